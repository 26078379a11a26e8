//! Errors as the API answers them.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use config::{AttachError, Problem};
use serde::Serialize;

use crate::plane::PlaneError;

/// Body of every answer that is no success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// Text of the error, for a person.
    pub error: String,
    /// Setting that the error is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Limit that was exceeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Every problem of the request, when there is more to say than `error` does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<Problem>,
}

/// An error with its HTTP status.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) body: ErrorBody,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        let body =
            ErrorBody { error: error.into(), field: None, limit: None, problems: Vec::new() };
        Self { status, body }
    }

    pub(crate) fn of_field(field: &str, error: impl Into<String>) -> Self {
        let mut this = Self::new(StatusCode::BAD_REQUEST, error);
        this.body.field = Some(field.into());
        this
    }

    pub(crate) fn with_limit(mut self, limit: impl ToString) -> Self {
        self.body.limit = Some(limit.to_string());
        self
    }
}

impl From<PlaneError> for ApiError {
    fn from(error: PlaneError) -> Self {
        let text = error.to_string();
        match error {
            PlaneError::NotFound { .. } => Self::new(StatusCode::NOT_FOUND, text),
            PlaneError::Conflict(_) | PlaneError::Attach(AttachError::Exists { .. }) => {
                Self::new(StatusCode::CONFLICT, text)
            }
            PlaneError::Invalid { field, limit, .. } => {
                let mut this = Self::of_field(field, text);
                this.body.limit = limit;
                this
            }
            PlaneError::Attach(AttachError::Invalid(problems)) | PlaneError::Settings(problems) => {
                let mut this = Self::new(StatusCode::BAD_REQUEST, text);
                if let Some(first) = problems.problems.first() {
                    this.body.field = Some(first.field.clone());
                    this.body.limit.clone_from(&first.limit);
                }
                this.body.problems = problems.problems;
                this
            }
            PlaneError::Refused(_) => Self::new(StatusCode::UNPROCESSABLE_ENTITY, text),
            PlaneError::Failed(_) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, text),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, axum::Json(self.body)).into_response()
    }
}
