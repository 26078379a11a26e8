//! Answers to commands: packets with numbers of their own.

use alloc::vec::Vec;

use crate::errors::SqlError;
use crate::packet::{Column, Writer};
use crate::show;

/// Answer to a command.
#[derive(Debug, Default)]
pub struct Answer {
    /// Number of its next packet.
    pub number: u8,
}

impl Answer {
    /// Says that the command was done.
    pub fn ok(&self, affected: u64, insert_id: u64, status: u16, out: &mut Vec<u8>) {
        Writer::new(out, self.number).ok(affected, insert_id, status);
    }

    /// Says that the command failed.
    pub fn error(&self, error: &SqlError, out: &mut Vec<u8>) {
        Writer::new(out, self.number).error(error);
    }

    /// Says a whole table.
    pub fn table(&self, (columns, rows): &show::Table, status: u16, out: &mut Vec<u8>) {
        let mut writer = Writer::new(out, self.number);
        writer.columns(columns, status);
        for row in rows {
            writer.packet(|p| crate::rows::put_values(p, row));
        }
        writer.end(status);
    }

    /// Says the head of a result.
    pub fn columns(&mut self, columns: &[Column], status: u16, out: &mut Vec<u8>) {
        let mut writer = Writer::new(out, self.number);
        writer.columns(columns, status);
        self.number = writer.number;
    }

    /// Says the end of a result.
    pub fn end(&self, status: u16, out: &mut Vec<u8>) {
        Writer::new(out, self.number).end(status);
    }
}
