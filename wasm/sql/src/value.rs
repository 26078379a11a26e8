//! Values between the protocol and the database.

use alloc::string::String;
use alloc::vec::Vec;

/// A value of a statement or a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// NULL.
    Null,
    /// A whole number.
    Int(i64),
    /// Any other.
    Real(f64),
    /// A string of characters: its bytes, as they came.
    Text(Vec<u8>),
    /// A string of bytes.
    Blob(Vec<u8>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.as_bytes().to_vec())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text.into_bytes())
    }
}
