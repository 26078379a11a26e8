//! Modules that speak a protocol of bytes, as a program would over a socket.
//!
//! # A stream
//! A client of such a module is one connection of a program. What the program sends is cut anywhere
//! into the bodies of the client's requests, at most [`CHUNK_BYTES`] each; what it gets are the
//! replies' bodies, in the order of the requests, each without its first byte, which has
//! [`reply_flag`]s. A request's reply need not be the answer to what the request says: it has the
//! next bytes that the module has for the program, maybe none, at most [`PIECE_BYTES`].
//!
//! With [`reply_flag::MORE`] the module has more to say than went into the reply. The client gets
//! it by requests without a body; what it sends otherwise waits in the module until then. So a
//! client sends no bytes after `MORE` until a reply comes without it, and never has more than
//! [`WINDOW_BYTES`] in [`MAX_REQUESTS`] requests without a reply. With [`reply_flag::CLOSE`] the
//! connection ends, after these bytes. All later requests are answered with `CLOSE` and nothing
//! else.
//!
//! When the program closes, or will send no more, the client takes the replies that are to come,
//! and ends with a goodbye.
//!
//! # What was lost
//! The module's memory has what the stream is about at the moment. So a stream whose numbers do not
//! go 1, 2, 3, … is one that an earlier life of the module has begun; it is answered with `CLOSE`.
//! Whoever connects again and meets another [`crate::module::Welcome::instance`], or is not known
//! any more, ends the program's connection. Requests are not [`crate::module::flag::REPEATABLE`].

/// Longest body of a request.
pub const CHUNK_BYTES: usize = 128 << 10;

/// Longest body of a reply, without its first byte.
pub const PIECE_BYTES: usize = 64 << 10;

/// Most requests without a reply: the host keeps that many replies, should the connection break.
pub const MAX_REQUESTS: usize = 12;

/// Most bytes in requests without a reply.
pub const WINDOW_BYTES: usize = 1 << 20;

/// Flags in the first byte of a reply.
pub mod reply_flag {
    /// The connection ends after this reply's bytes.
    pub const CLOSE: u8 = 1;
    /// More bytes can be had, by a request without a body.
    pub const MORE: u8 = 2;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::module::MAX_BODY_BYTES;

    #[test]
    fn a_chunk_and_a_piece_are_bodies_and_a_chunk_fits_the_window() {
        const { assert!(CHUNK_BYTES <= WINDOW_BYTES) };
        const { assert!(PIECE_BYTES < MAX_BODY_BYTES as usize) };
        assert_eq!(reply_flag::CLOSE & reply_flag::MORE, 0);
    }
}
