//! Copies of modules' files: bodies that are as long as the files, passed on as they come.
//!
//! The plane works on a thread of its own, with plain reads and writes. A connection that neither
//! takes nor sends anything for a minute is given up.

use std::io::{self, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, RawQuery, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as HttpBody, Frame};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::answer::ApiError;
use super::routes::ask;
use crate::plane::Plane;

/// Longest time without progress of the other end.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Pieces that wait for the other end, of [`PIECE_BYTES`].
const PIECES: usize = 4;

/// Bytes that are passed on at a time.
const PIECE_BYTES: usize = 256 << 10;

/// A body that comes from another thread.
struct Piped(mpsc::Receiver<Bytes>);

impl HttpBody for Piped {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

/// Writer of such a body, for the other thread.
struct BodyWriter {
    to: mpsc::Sender<Bytes>,
    pending: Vec<u8>,
    runtime: Handle,
}

impl Write for BodyWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = Bytes::from(std::mem::take(&mut self.pending));
        if piece.is_empty() {
            return Ok(());
        }
        let sent = self.to.send_timeout(piece, STALL_TIMEOUT);
        // The other end has gone, or takes nothing.
        self.runtime.block_on(sent).map_err(|e| match e {
            mpsc::error::SendTimeoutError::Timeout(_) => io::ErrorKind::TimedOut.into(),
            mpsc::error::SendTimeoutError::Closed(_) => io::ErrorKind::BrokenPipe.into(),
        })
    }
}

/// A request's body, read on another thread.
struct BodyReader {
    body: Body,
    left: Bytes,
    runtime: Handle,
}

impl Read for BodyReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.left.is_empty() {
            let body = &mut self.body;
            let next = std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx));
            let next = async { tokio::time::timeout(STALL_TIMEOUT, next).await };
            let next = self.runtime.block_on(next).map_err(|_| io::ErrorKind::TimedOut)?;
            match next {
                None => return Ok(0),
                Some(Ok(frame)) => self.left = frame.into_data().unwrap_or_default(),
                Some(Err(e)) => return Err(io::Error::other(e)),
            }
        }
        let n = into.len().min(self.left.len());
        into[..n].copy_from_slice(&self.left.split_to(n));
        Ok(n)
    }
}

type Shared = State<Arc<dyn Plane>>;

/// `GET /v1/vms/{vm}/modules/{module}/backup`.
pub async fn back_up(
    State(plane): Shared,
    Path((vm, module)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let work = ask(plane, move |p| p.back_up(&vm, &module)).await??;
    let (to, from) = mpsc::channel(PIECES);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let mut writer = BodyWriter { to, pending: Vec::new(), runtime };
        work(&mut writer);
        // Whoever has gone by now knows that the copy is not whole.
        let _ = writer.flush();
    });
    let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok((kind, Body::new(Piped(from))).into_response())
}

/// `PUT /v1/vms/{vm}/modules/{module}/restore`.
pub async fn restore(
    State(plane): Shared,
    Path((vm, module)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Response, ApiError> {
    let replace = match query.as_deref() {
        None | Some("replace=false") => false,
        Some("replace=true") => true,
        Some(_) => {
            let text = "replace: write ?replace=true or ?replace=false, and nothing else";
            return Err(ApiError::of_field("replace", text));
        }
    };
    let mut reader = BodyReader { body, left: Bytes::new(), runtime: Handle::current() };
    let restored = ask(plane, move |p| p.restore(&vm, &module, replace, &mut reader)).await??;
    Ok(Json(restored).into_response())
}
