//! A program's connection for tests of modules, as a relay would make it.

use std::vec::Vec;

use guest_abi::stream::{CHUNK_BYTES, PIECE_BYTES, reply_flag};

use crate::Module;
use crate::testing::{EventBytes, TestHost};

/// A program that is connected to a module.
#[derive(Debug)]
pub struct Program {
    client: u32,
    seq: u64,
    has_more: bool,
    /// The module has ended the stream.
    pub is_closed: bool,
}

impl Program {
    /// Connects as the host's client of that number.
    pub fn connect<M: Module>(host: &mut TestHost, module: &mut M, client: u32) -> Self {
        serve(host, module, &EventBytes::new().opened(client, [1; 16]));
        Self { client, seq: 0, has_more: false, is_closed: false }
    }

    /// Sends bytes as one request, if they are not too many, and gets all that the module says to
    /// them.
    pub fn say<M: Module>(&mut self, host: &mut TestHost, module: &mut M, bytes: &[u8]) -> Vec<u8> {
        let mut said = Vec::new();
        for chunk in bytes.chunks(CHUNK_BYTES) {
            said.extend(self.request(host, module, chunk));
            while self.has_more {
                said.extend(self.request(host, module, &[]));
            }
        }
        said
    }

    /// Sends one request, and returns its reply.
    pub fn request<M: Module>(
        &mut self,
        host: &mut TestHost,
        module: &mut M,
        body: &[u8],
    ) -> Vec<u8> {
        self.seq += 1;
        serve(host, module, &EventBytes::new().request(self.client, self.seq, 0, body));
        let mut replies = host.replies();
        assert_eq!(replies.len(), 1, "each request has one reply");
        let reply = replies.remove(0);
        assert_eq!((reply.client, reply.seq), (self.client, self.seq));
        let (flags, said) = reply.body.split_first().expect("a reply has flags");
        assert!(said.len() <= PIECE_BYTES && flags & !(reply_flag::CLOSE | reply_flag::MORE) == 0);
        assert!(!self.is_closed || said.is_empty(), "nothing is said behind the end");
        self.has_more = flags & reply_flag::MORE != 0;
        assert!(!self.has_more || said.len() == PIECE_BYTES, "a piece is full, or the last");
        self.is_closed = flags & reply_flag::CLOSE != 0;
        said.to_vec()
    }

    /// Whether the module has more to say.
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// Goes.
    pub fn close<M: Module>(self, host: &mut TestHost, module: &mut M) {
        serve(host, module, &EventBytes::new().closed(self.client));
    }
}

fn serve<M: Module>(host: &mut TestHost, module: &mut M, events: &EventBytes) {
    host.serve(module, events).expect("a module that goes on");
}
