//! vsock
