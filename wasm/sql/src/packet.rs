//! Packets of MySQL's protocol, version 10 of the handshake, 4.1 of the rest.
//!
//! A packet is three bytes of length, one of its number, and the payload. Numbers begin at 0 with
//! each command and count on through the answer. Payloads of 16 MiB and more, which would be
//! several packets, are refused.

use alloc::vec::Vec;

use crate::errors::SqlError;

/// Bytes in front of a payload.
pub const HEAD_BYTES: usize = 4;
/// Longest payload.
pub const MAX_PAYLOAD_BYTES: usize = 0xff_ffff - 1;

/// Capabilities of a client and a server.
pub mod capability {
    /// Affected rows are those found.
    pub const FOUND_ROWS: u32 = 2;
    /// The handshake may name a database.
    pub const CONNECT_WITH_DB: u32 = 8;
    /// The protocol as it is since 4.1.
    pub const PROTOCOL_41: u32 = 0x200;
    /// Answers have status flags.
    pub const TRANSACTIONS: u32 = 0x2000;
    /// The answer to the challenge has its length in front.
    pub const SECURE_CONNECTION: u32 = 0x8000;
    /// The handshake names a way to prove who one is.
    pub const PLUGIN_AUTH: u32 = 0x8_0000;
    /// The length of the proof is an encoded integer.
    pub const LENENC_AUTH: u32 = 0x20_0000;
    /// The server's.
    pub const OURS: u32 = 1
        | FOUND_ROWS
        | 4
        | CONNECT_WITH_DB
        | PROTOCOL_41
        | TRANSACTIONS
        | SECURE_CONNECTION
        | PLUGIN_AUTH
        | LENENC_AUTH;
}

/// Commands.
pub mod command {
    /// The connection ends.
    pub const QUIT: u8 = 1;
    /// Another database.
    pub const INIT_DB: u8 = 2;
    /// A statement.
    pub const QUERY: u8 = 3;
    /// A table's columns.
    pub const FIELD_LIST: u8 = 4;
    /// A line of statistics.
    pub const STATISTICS: u8 = 9;
    /// Ping.
    pub const PING: u8 = 14;
    /// A prepared statement.
    pub const PREPARE: u8 = 22;
    /// An option.
    pub const SET_OPTION: u8 = 27;
    /// Reset of the session.
    pub const RESET: u8 = 31;
}

/// Status flags of answers.
pub mod status {
    /// A transaction is open.
    pub const IN_TRANSACTION: u16 = 1;
    /// Statements are transactions of their own.
    pub const AUTOCOMMIT: u16 = 2;
}

/// Types of columns.
pub mod column_type {
    /// A whole number of 64 bits.
    pub const LONGLONG: u8 = 8;
    /// A floating point number.
    pub const DOUBLE: u8 = 5;
    /// A decimal number as text.
    pub const NEWDECIMAL: u8 = 246;
    /// A long string.
    pub const BLOB: u8 = 252;
    /// A string.
    pub const VAR_STRING: u8 = 253;
}

/// Character sets.
pub mod charset {
    /// Text: `utf8mb4_general_ci`.
    pub const UTF8MB4: u16 = 45;
    /// Bytes.
    pub const BINARY: u16 = 63;
}

/// A column of a result.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Column {
    /// Name.
    pub name: Vec<u8>,
    /// The table that it is of.
    pub table: Vec<u8>,
    /// Name in the table.
    pub origin: Vec<u8>,
    /// [`column_type`].
    pub kind: u8,
    /// [`charset`].
    pub charset: u16,
}

/// The next packet: its number, its payload and its bytes in all. None: it has not come in whole.
pub fn take(input: &[u8]) -> Option<(u8, &[u8], usize)> {
    let head: [u8; HEAD_BYTES] = input.get(..HEAD_BYTES)?.try_into().ok()?;
    let len = len_bytes(head);
    let payload = input.get(HEAD_BYTES..HEAD_BYTES + len)?;
    Some((head[3], payload, HEAD_BYTES + len))
}

/// Whether what comes is longer than a packet may be.
pub fn is_too_long(input: &[u8]) -> bool {
    let head = input.get(..HEAD_BYTES).and_then(|head| head.try_into().ok());
    head.is_some_and(|head| len_bytes(head) > MAX_PAYLOAD_BYTES)
}

fn len_bytes(head: [u8; HEAD_BYTES]) -> usize {
    u32::from_le_bytes([head[0], head[1], head[2], 0]) as usize
}

/// Writes packets of one answer.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut Vec<u8>,
    /// Number of the next one.
    pub number: u8,
}

impl<'a> Writer<'a> {
    /// Begins; the first packet has that number.
    pub fn new(out: &'a mut Vec<u8>, number: u8) -> Self {
        Self { out, number }
    }

    /// Writes one packet. False: it would be too long, and is not there.
    pub fn packet(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        let start = self.out.len();
        self.out.extend_from_slice(&[0; HEAD_BYTES]);
        write(self.out);
        let len = self.out.len() - start - HEAD_BYTES;
        if len > MAX_PAYLOAD_BYTES {
            self.out.truncate(start);
            return false;
        }
        self.out[start..start + 3].copy_from_slice(&(len as u32).to_le_bytes()[..3]);
        self.out[start + 3] = self.number;
        self.number = self.number.wrapping_add(1);
        true
    }

    /// The first packet of a connection.
    pub fn greeting(&mut self, id: u32, challenge: &[u8; 20], version: &str) {
        self.packet(|p| {
            p.push(10);
            p.extend_from_slice(version.as_bytes());
            p.push(0);
            p.extend_from_slice(&id.to_le_bytes());
            p.extend_from_slice(&challenge[..8]);
            p.push(0);
            p.extend_from_slice(&(capability::OURS as u16).to_le_bytes());
            p.push(charset::UTF8MB4 as u8);
            p.extend_from_slice(&status::AUTOCOMMIT.to_le_bytes());
            p.extend_from_slice(&((capability::OURS >> 16) as u16).to_le_bytes());
            p.push(21);
            p.extend_from_slice(&[0; 10]);
            p.extend_from_slice(&challenge[8..]);
            p.push(0);
            p.extend_from_slice(b"mysql_native_password\0");
        });
    }

    /// Says that a command is done.
    pub fn ok(&mut self, affected: u64, insert_id: u64, status: u16) {
        self.packet(|p| {
            p.push(0);
            put_number(p, affected);
            put_number(p, insert_id);
            p.extend_from_slice(&status.to_le_bytes());
            p.extend_from_slice(&[0; 2]);
        });
    }

    /// Says that a command failed.
    pub fn error(&mut self, error: &SqlError) {
        self.packet(|p| {
            p.push(0xff);
            p.extend_from_slice(&error.code.to_le_bytes());
            p.push(b'#');
            p.extend_from_slice(error.state().as_bytes());
            p.extend_from_slice(error.text.as_bytes());
        });
    }

    /// Behind columns, and behind rows.
    pub fn end(&mut self, status: u16) {
        self.packet(|p| {
            p.extend_from_slice(&[0xfe, 0, 0]);
            p.extend_from_slice(&status.to_le_bytes());
        });
    }

    /// The head of a result: how many columns, and what they are.
    pub fn columns(&mut self, columns: &[Column], status: u16) {
        self.packet(|p| put_number(p, columns.len() as u64));
        for column in columns {
            self.column(column, false);
        }
        self.end(status);
    }

    /// Says one column's description.
    pub fn column(&mut self, column: &Column, with_default: bool) {
        self.packet(|p| {
            put_bytes(p, b"def");
            put_bytes(p, b"");
            put_bytes(p, &column.table);
            put_bytes(p, &column.table);
            put_bytes(p, &column.name);
            put_bytes(p, &column.origin);
            p.push(12);
            p.extend_from_slice(&column.charset.to_le_bytes());
            // The longest value there may be.
            p.extend_from_slice(&(16u32 << 20).to_le_bytes());
            p.push(column.kind);
            let flags: u16 = if column.charset == charset::BINARY { 0x80 } else { 0 };
            p.extend_from_slice(&flags.to_le_bytes());
            // Digits behind the point: not told.
            p.extend_from_slice(&[31, 0, 0]);
            if with_default {
                p.push(0xfb);
            }
        });
    }
}

/// Adds a number in the protocol's own encoding.
pub fn put_number(out: &mut Vec<u8>, number: u64) {
    match number {
        0..=250 => out.push(number as u8),
        251..=0xffff => {
            out.push(0xfc);
            out.extend_from_slice(&(number as u16).to_le_bytes());
        }
        0x1_0000..=0xff_ffff => {
            out.push(0xfd);
            out.extend_from_slice(&(number as u32).to_le_bytes()[..3]);
        }
        _ => {
            out.push(0xfe);
            out.extend_from_slice(&number.to_le_bytes());
        }
    }
}

/// Adds bytes with their length in front.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// A number and what is behind it.
pub fn get_number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (first, rest) = bytes.split_first()?;
    let len = match first {
        0..=250 => return Some((u64::from(*first), rest)),
        0xfc => 2,
        0xfd => 3,
        0xfe => 8,
        _ => return None,
    };
    let mut number = [0; 8];
    number[..len].copy_from_slice(rest.get(..len)?);
    Some((u64::from_le_bytes(number), &rest[len..]))
}

/// First packet of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Login {
    /// [`capability`].
    pub capabilities: u32,
    /// The database that it wants.
    pub database: Option<Vec<u8>>,
}

/// Reads a client's first packet. None: it is none.
pub fn login(payload: &[u8]) -> Option<Login> {
    let capabilities = u32::from_le_bytes(payload.get(..4)?.try_into().ok()?);
    if capabilities & capability::PROTOCOL_41 == 0 {
        return None;
    }
    // Longest packet, character set, 23 bytes of nothing; then the user's name, which is not looked
    // at.
    let rest = payload.get(32..)?;
    let (_, rest) = until_zero(rest)?;
    let (proof_bytes, rest) = if capabilities & capability::LENENC_AUTH != 0 {
        get_number(rest)?
    } else if capabilities & capability::SECURE_CONNECTION != 0 {
        let (len, rest) = rest.split_first()?;
        (u64::from(*len), rest)
    } else {
        (0, until_zero(rest)?.1)
    };
    let rest = rest.get(usize::try_from(proof_bytes).ok()?..)?;
    let mut database = None;
    if capabilities & capability::CONNECT_WITH_DB != 0 {
        // Some clients say that they name one, and name none.
        let name = until_zero(rest).map_or(rest, |(name, _)| name);
        database = (!name.is_empty()).then(|| name.to_vec());
    }
    Some(Login { capabilities, database })
}

/// Splits bytes at a zero: those before it, and those behind it.
pub fn until_zero(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|&b| b == 0)?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

#[cfg(test)]
mod tests;
