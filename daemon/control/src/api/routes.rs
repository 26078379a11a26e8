//! The routes: from HTTP to the plane and back.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post, put};
use axum::{Json, Router};
use config::parse_size;
use serde::Serialize;
use serde_json::Value;

use super::answer::ApiError;
use super::copies;
use crate::metrics;
use crate::plane::{Plane, PlaneError};

/// Largest request body. A port with every setting takes 1 KiB.
pub const MAX_BODY_LEN_BYTES: usize = 64 << 10;

/// Longest time for a body to arrive: it comes from the same host.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time for an answer. Detaching waits for I/O in flight, which a slow disk can hold up.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The API's own description (OpenAPI 3.1).
pub const SCHEMA: &str = include_str!("../../schema/api.json");

type Shared = State<Arc<dyn Plane>>;
type Answer = Result<Response, ApiError>;

/// Answer of `GET /v1/version`.
#[derive(Debug, Serialize)]
struct Version {
    version: &'static str,
    api: &'static str,
}

/// The API over `plane`.
pub fn router(plane: Arc<dyn Plane>) -> Router {
    Router::new()
        .route("/v1/version", get(version))
        .route("/v1/schema", get(schema))
        .route("/v1/status", get(status))
        .route("/v1/metrics", get(prometheus))
        .route("/v1/log", get(log_filter).put(set_log_filter))
        .route("/v1/ports", get(ports))
        .route("/v1/pipes", get(pipes))
        .route("/v1/channels", get(channels))
        .route("/v1/modules", get(modules))
        .route("/v1/vms/{vm}", patch(set_vm))
        .route("/v1/vms/{vm}/ports", post(attach))
        .route("/v1/vms/{vm}/ports/{port}", delete(detach))
        .route("/v1/vms/{vm}/ports/{port}/start", post(start))
        .route("/v1/vms/{vm}/disks/{port}/resize", post(resize))
        .route("/v1/vms/{vm}/disks/{port}/resume", post(resume))
        .route("/v1/vms/{vm}/nets/{port}/link", put(link))
        .route("/v1/vms/{vm}/channel/join", post(join_channel))
        .route("/v1/vms/{vm}/channel/leave", post(leave_channel))
        .route("/v1/vms/{vm}/modules", get(modules_of_vm))
        .route("/v1/vms/{vm}/modules/load", post(load_modules))
        .route("/v1/vms/{vm}/modules/drain", post(drain_modules))
        .route("/v1/vms/{vm}/modules/resume", post(resume_modules))
        .route("/v1/vms/{vm}/modules/{module}/backup", get(copies::back_up))
        .route("/v1/shutdown", post(shutdown))
        .layer(middleware::from_fn(in_time))
        // It takes as long as its body.
        .route("/v1/vms/{vm}/modules/{module}/restore", put(copies::restore))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(plane)
}

/// The part of the API that changes nothing and shows no content of modules' files: listings and
/// metrics. Every route that is not named here is refused, also one that is added to [`router`].
pub fn read_only_router(plane: Arc<dyn Plane>) -> Router {
    Router::new()
        .route("/v1/version", get(version))
        .route("/v1/schema", get(schema))
        .route("/v1/status", get(status))
        .route("/v1/metrics", get(prometheus))
        // Where collectors look for it.
        .route("/metrics", get(prometheus))
        .route("/v1/log", get(log_filter))
        .route("/v1/ports", get(ports))
        .route("/v1/pipes", get(pipes))
        .route("/v1/channels", get(channels))
        .route("/v1/modules", get(modules))
        .route("/v1/vms/{vm}/modules", get(modules_of_vm))
        .layer(middleware::from_fn(in_time))
        .fallback(read_only)
        .method_not_allowed_fallback(read_only)
        .with_state(plane)
}

/// Ends a request that takes too long. The work behind it goes on: it cannot be taken back.
async fn in_time(request: Request, next: Next) -> Response {
    match tokio::time::timeout(ANSWER_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let text =
                format!("no answer within {} s; it may still be done", ANSWER_TIMEOUT.as_secs());
            ApiError::new(StatusCode::GATEWAY_TIMEOUT, text).into_response()
        }
    }
}

/// Runs `f`, which may wait for a device, away from the API's only thread.
pub(super) async fn ask<R: Send + 'static>(
    plane: Arc<dyn Plane>,
    f: impl FnOnce(&dyn Plane) -> R + Send + 'static,
) -> Result<R, ApiError> {
    tokio::task::spawn_blocking(move || f(&*plane)).await.map_err(|e| {
        tracing::error!("a control request panicked: {e}");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request failed by a bug of ours")
    })
}

/// A body of JSON, whatever its content type says; none when it is empty.
async fn json(body: Body) -> Result<Option<Value>, ApiError> {
    let bytes = tokio::time::timeout(BODY_TIMEOUT, axum::body::to_bytes(body, MAX_BODY_LEN_BYTES));
    let bytes = bytes
        .await
        .map_err(|_| {
            let text = format!("the body did not arrive within {} s", BODY_TIMEOUT.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, text)
        })?
        .map_err(|_| {
            let text = format!("the body is cut short, or larger than {MAX_BODY_LEN_BYTES} bytes");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, text).with_limit(MAX_BODY_LEN_BYTES)
        })?;
    if bytes.is_empty() {
        return Ok(None);
    }
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|e| ApiError::new(StatusCode::BAD_REQUEST, format!("the body is not JSON: {e}")))
}

/// The members of an object; others than `known` are refused.
fn members<'a, const N: usize>(
    body: Option<&'a Value>,
    known: [&str; N],
) -> Result<[Option<&'a Value>; N], ApiError> {
    let Some(body) = body else {
        return Ok([None; N]);
    };
    let Some(object) = body.as_object() else {
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "the body is not a JSON object"));
    };
    if let Some(key) = object.keys().find(|k| !known.contains(&k.as_str())) {
        let key: String = key.chars().take(64).collect();
        let text = format!("{key}: is not a member; known are {}", known.join(", "));
        return Err(ApiError::of_field(&key, text));
    }
    Ok(known.map(|k| object.get(k)))
}

async fn version() -> Response {
    Json(Version { version: env!("CARGO_PKG_VERSION"), api: "v1" }).into_response()
}

async fn schema() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], SCHEMA).into_response()
}

async fn status(State(plane): Shared) -> Answer {
    Ok(Json(ask(plane, |p| p.status()).await?).into_response())
}

async fn ports(State(plane): Shared) -> Answer {
    Ok(Json(ask(plane, |p| p.ports()).await?).into_response())
}

async fn pipes(State(plane): Shared) -> Answer {
    Ok(Json(ask(plane, |p| p.pipes()).await?).into_response())
}

async fn channels(State(plane): Shared) -> Answer {
    Ok(Json(ask(plane, |p| p.channels()).await?).into_response())
}

async fn join_channel(State(plane): Shared, Path(vm): Path<String>) -> Answer {
    Ok(Json(ask(plane, move |p| p.join_channel(&vm)).await??).into_response())
}

async fn leave_channel(State(plane): Shared, Path(vm): Path<String>) -> Answer {
    ask(plane, move |p| p.leave_channel(&vm)).await??;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn modules(State(plane): Shared) -> Answer {
    Ok(Json(ask(plane, |p| p.modules(None)).await??).into_response())
}

async fn modules_of_vm(State(plane): Shared, Path(vm): Path<String>) -> Answer {
    Ok(Json(ask(plane, move |p| p.modules(Some(&vm))).await??).into_response())
}

async fn load_modules(State(plane): Shared, Path(vm): Path<String>) -> Answer {
    Ok(Json(ask(plane, move |p| p.load_modules(&vm)).await??).into_response())
}

async fn drain_modules(State(plane): Shared, Path(vm): Path<String>) -> Answer {
    Ok(Json(ask(plane, move |p| p.drain_modules(&vm)).await??).into_response())
}

async fn resume_modules(State(plane): Shared, Path(vm): Path<String>) -> Answer {
    Ok(Json(ask(plane, move |p| p.resume_modules(&vm)).await??).into_response())
}

async fn prometheus(State(plane): Shared) -> Answer {
    let text = ask(plane, |p| metrics::render(&p.metrics())).await?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

async fn log_filter(State(plane): Shared) -> Answer {
    Ok(Json(ask(plane, |p| p.log_filter()).await?).into_response())
}

async fn set_log_filter(State(plane): Shared, body: Body) -> Answer {
    let body = json(body).await?;
    let [filter] = members(body.as_ref(), ["filter"])?;
    let Some(filter) = filter.and_then(Value::as_str).map(String::from) else {
        let text = "filter: is missing or no string; write {\"filter\": \"info,net=debug\"}";
        return Err(ApiError::of_field("filter", text));
    };
    Ok(Json(ask(plane, move |p| p.set_log_filter(&filter)).await??).into_response())
}

async fn attach(State(plane): Shared, Path(vm): Path<String>, body: Body) -> Answer {
    let body = json(body).await?.unwrap_or(Value::Null);
    let port = ask(plane, move |p| p.attach(&vm, &body)).await??;
    Ok((StatusCode::CREATED, Json(port)).into_response())
}

async fn start(State(plane): Shared, Path((vm, port)): Path<(String, String)>) -> Answer {
    Ok(Json(ask(plane, move |p| p.start(&vm, &port)).await??).into_response())
}

async fn set_vm(State(plane): Shared, Path(vm): Path<String>, body: Body) -> Answer {
    let body = json(body).await?.unwrap_or(Value::Null);
    let credit = ask(plane, move |p| p.set_credit(&vm, &body)).await??;
    Ok(Json(credit).into_response())
}

async fn detach(State(plane): Shared, Path((vm, port)): Path<(String, String)>) -> Answer {
    let detached = ask(plane, move |p| p.detach(&vm, &port)).await??;
    if detached.requests_in_disk == 0 {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok((StatusCode::ACCEPTED, Json(detached)).into_response())
}

async fn resume(State(plane): Shared, Path((vm, port)): Path<(String, String)>) -> Answer {
    let resumed = ask(plane, move |p| p.resume(&vm, &port)).await??;
    Ok(Json(serde_json::json!({ "resumed": resumed })).into_response())
}

async fn resize(
    State(plane): Shared,
    Path((vm, port)): Path<(String, String)>,
    body: Body,
) -> Answer {
    let body = json(body).await?;
    let [size] = members(body.as_ref(), ["size"])?;
    let len_bytes = match size {
        None => None,
        Some(Value::String(text)) => Some(parse_size(text).ok_or_else(|| {
            ApiError::of_field("size", format!("size: {text:?} is no size; write \"64MiB\""))
        })?),
        Some(value) => Some(value.as_u64().ok_or_else(|| {
            ApiError::of_field("size", "size: is no number of bytes; write 67108864 or \"64MiB\"")
        })?),
    };
    let len_bytes = ask(plane, move |p| p.resize(&vm, &port, len_bytes)).await??;
    Ok(Json(serde_json::json!({ "len_bytes": len_bytes })).into_response())
}

async fn link(
    State(plane): Shared,
    Path((vm, port)): Path<(String, String)>,
    body: Body,
) -> Answer {
    let body = json(body).await?;
    let [up] = members(body.as_ref(), ["up"])?;
    let Some(up) = up.and_then(Value::as_bool) else {
        return Err(ApiError::of_field("up", "up: is missing or no boolean; write {\"up\": true}"));
    };
    let seen = ask(plane, move |p| p.set_link(&vm, &port, up)).await??;
    Ok(Json(serde_json::json!({ "up": up, "seen_by_guest": seen })).into_response())
}

async fn shutdown(State(plane): Shared, body: Body) -> Answer {
    let body = json(body).await?;
    let [forget] = members(body.as_ref(), ["forget"])?;
    let forget = match forget {
        None => false,
        Some(Value::Bool(forget)) => *forget,
        Some(_) => return Err(ApiError::of_field("forget", "forget: is no boolean")),
    };
    ask(plane, move |p| p.shutdown(forget)).await?;
    Ok((StatusCode::ACCEPTED, Json(serde_json::json!({ "stopping": true }))).into_response())
}

async fn read_only(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(128).collect();
    let text = format!(
        "{} {path} is not for this socket, which is for listings and metrics; ask on the control socket",
        request.method()
    );
    ApiError::new(StatusCode::FORBIDDEN, text)
}

async fn no_route(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(128).collect();
    PlaneError::NotFound { what: "route", name: path }.into()
}

async fn no_method(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(128).collect();
    let text = format!("{path} does not take {}", request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, text)
}
