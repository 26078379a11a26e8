//! Common part of all fuzz targets: how they are run, and the memory that an input may take.
//!
//! # Theory of operation
//! A target is a function of bytes in [`fuzz_target`]: it panics if something is wrong. It is built
//! in two ways. cargo-fuzz (`make fuzz`) sets `cfg(fuzzing)`, and libFuzzer looks for inputs that
//! reach new code, for as long as one likes. Without that ([`mutate`], a part of `make test`) a
//! target is an ordinary program, which takes the seeds in `seeds/<target>` and random changes of
//! them for some seconds: no C++ and no sanitizers are needed, and the same inputs come in each
//! run. `test/fuzz/short` has all such targets in one program, since linking takes longer than
//! running. An input that panics is kept in `artifacts/<target>`; a target that is called with
//! files runs those.
//!
//! # Limits
//! - An input may take [`memory::MAX_BYTES`] more of the heap than there was before.
//! - Seeds are a few files of a few hundred bytes for each target, some of them chosen from what
//!   libFuzzer has found: each has code to itself.

pub mod memory;
pub mod mutate;

/// The input, read front to back; zeroes behind its end.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// True when nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        self.number(1) as u8
    }

    /// The next two bytes, the lowest first.
    pub fn u16(&mut self) -> u16 {
        self.number(2) as u16
    }

    /// The next four bytes, the lowest first.
    pub fn u32(&mut self) -> u32 {
        self.number(4) as u32
    }

    /// The next eight bytes, the lowest first.
    pub fn u64(&mut self) -> u64 {
        self.number(8)
    }

    /// The next bytes, at most as many as there are.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn number(&mut self, len: usize) -> u64 {
        self.bytes(len).iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
    }
}

/// Makes a program of a function of bytes. The name of the target is that of its file.
#[macro_export]
macro_rules! fuzz_target {
    (|$bytes:ident: &[u8]| $body:block) => {
        fn one($bytes: &[u8]) {
            $body
        }

        #[cfg(fuzzing)]
        ::libfuzzer_sys::fuzz_target!(|bytes: &[u8]| $crate::memory::bounded(bytes, one));

        /// Runs the target on files, or on its seeds and on changes of them.
        #[cfg(not(fuzzing))]
        pub fn run(files: &[std::path::PathBuf]) -> std::process::ExitCode {
            let name = module_path!().rsplit("::").next().unwrap_or_default();
            $crate::mutate::run(name, files, |bytes| $crate::memory::bounded(bytes, one))
        }

        /// The target alone as a program, whose arguments are files.
        #[cfg(not(fuzzing))]
        #[allow(dead_code)]
        fn main() -> std::process::ExitCode {
            let files = std::env::args_os().skip(1).map(std::path::PathBuf::from);
            run(&files.collect::<Vec<_>>())
        }
    };
}
