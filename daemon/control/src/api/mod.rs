//! The control API: HTTP and JSON on a Unix socket. `schema/api.json` describes it.

mod answer;
mod copies;
mod routes;
mod server;

pub use answer::ErrorBody;
pub use routes::{MAX_BODY_LEN_BYTES, SCHEMA, read_only_router, router};
pub use server::{ApiServer, MAX_CONNECTIONS, MAX_READERS};
