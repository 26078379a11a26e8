//! Rows of SQLite as MySQL's: columns' types, and values as text.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;

use crate::db::Statement;
use crate::ffi;
use crate::packet::{Column, charset, column_type, put_bytes};
use crate::value::Value;

/// NULL in a row.
const NULL: u8 = 0xfb;

/// Form in which the values of a column are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Values as they are.
    Plain,
    /// Values with a number of digits behind the point.
    Decimal(usize),
}

/// The columns of a statement's result. It stands on its first row, if it has one.
pub fn columns(statement: &Statement, has_row: bool) -> (Vec<Column>, Vec<Form>) {
    (0..statement.columns()).map(|at| column(statement, at, has_row)).unzip()
}

fn column(statement: &Statement, at: usize, has_row: bool) -> (Column, Form) {
    let (table, origin) = statement.column_origin(at).unwrap_or_default();
    let declared = statement.column_type(at).map(|name| name.to_ascii_uppercase());
    let (kind, charset, form) = match declared.as_deref() {
        Some(name) => of_declared(name),
        None => of_value(if has_row { statement.kind(at) } else { ffi::SQLITE_NULL }),
    };
    let name = statement.column_name(at).into_bytes();
    let (table, origin) = (table.into_bytes(), origin.into_bytes());
    (Column { name, table, origin, kind, charset }, form)
}

fn of_declared(name: &str) -> (u8, u16, Form) {
    use column_type::{BLOB, DOUBLE, LONGLONG, NEWDECIMAL, VAR_STRING};
    if name.starts_with("DECIMAL") {
        let digits = name.trim_end_matches(')').rsplit(',').next().and_then(|n| n.parse().ok());
        return (NEWDECIMAL, charset::BINARY, Form::Decimal(digits.unwrap_or(0)));
    }
    // In the order in which SQLite looks.
    if name.contains("INT") {
        (LONGLONG, charset::BINARY, Form::Plain)
    } else if name.contains("CHAR") || name.contains("TEXT") {
        (VAR_STRING, charset::UTF8MB4, Form::Plain)
    } else if name.contains("BLOB") {
        (BLOB, charset::BINARY, Form::Plain)
    } else {
        (DOUBLE, charset::BINARY, Form::Plain)
    }
}

fn of_value(kind: i32) -> (u8, u16, Form) {
    match kind {
        ffi::SQLITE_INTEGER => (column_type::LONGLONG, charset::BINARY, Form::Plain),
        ffi::SQLITE_FLOAT => (column_type::DOUBLE, charset::BINARY, Form::Plain),
        ffi::SQLITE_BLOB => (column_type::BLOB, charset::BINARY, Form::Plain),
        _ => (column_type::VAR_STRING, charset::UTF8MB4, Form::Plain),
    }
}

/// Adds the row that a statement stands on.
pub fn put_row(out: &mut Vec<u8>, statement: &Statement, forms: &[Form]) {
    let mut text = String::new();
    for (at, form) in forms.iter().enumerate() {
        match (statement.kind(at), form) {
            (ffi::SQLITE_NULL, _) => out.push(NULL),
            (ffi::SQLITE_INTEGER, Form::Plain) => {
                text.clear();
                let _ = write!(text, "{}", statement.int(at));
                put_bytes(out, text.as_bytes());
            }
            (ffi::SQLITE_INTEGER | ffi::SQLITE_FLOAT, Form::Decimal(digits)) => {
                put_bytes(out, format!("{:.*}", digits, statement.real(at)).as_bytes());
            }
            (ffi::SQLITE_FLOAT, Form::Plain) => put_bytes(out, real(statement.real(at)).as_bytes()),
            _ => put_bytes(out, statement.bytes(at)),
        }
    }
}

/// Adds a row of values.
pub fn put_values(out: &mut Vec<u8>, values: &[Value]) {
    for value in values {
        match value {
            Value::Null => out.push(NULL),
            Value::Int(n) => put_bytes(out, format!("{n}").as_bytes()),
            Value::Real(x) => put_bytes(out, real(*x).as_bytes()),
            Value::Text(bytes) | Value::Blob(bytes) => put_bytes(out, bytes),
        }
    }
}

/// The shortest text that is this number and no other.
fn real(x: f64) -> String {
    let size = x.abs();
    if x == 0.0 || (1e-5..1e15).contains(&size) { format!("{x}") } else { format!("{x:e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_short_as_they_can_be() {
        assert_eq!(real(1.1), "1.1");
        assert_eq!(real(-0.0), "-0");
        assert_eq!(real(3.0), "3");
        assert_eq!(real(1e300), "1e300");
        assert_eq!(real(2.5e-10), "2.5e-10");
    }

    #[test]
    fn columns_have_the_types_they_were_made_with() {
        assert_eq!(of_declared("DECIMAL(10,2)"), (246, 63, Form::Decimal(2)));
        assert_eq!(of_declared("BIGINT UNSIGNED"), (8, 63, Form::Plain));
        assert_eq!(of_declared("LONG_BLOB"), (252, 63, Form::Plain));
        assert_eq!(of_declared("DATETIME_TEXT"), (253, 45, Form::Plain));
        assert_eq!(of_declared("DOUBLE"), (5, 63, Form::Plain));
    }
}
