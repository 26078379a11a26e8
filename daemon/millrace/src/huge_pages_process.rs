//! The process that moves VMs' memory into huge pages.

use std::io;
use std::os::fd::AsFd;

use anyhow::Context;

use crate::exit;
use crate::module_process::ignore_terminal;

/// `millrace huge-pages-process`: its standard input is the socket to the daemon.
pub fn run() -> anyhow::Result<u8> {
    // Its program is called `exe`, after the path that the daemon starts it by.
    rustix::thread::set_name(c"millrace-pages").context("naming the process")?;
    ignore_terminal();
    queue::block_mover::serve(io::stdin().as_fd()).context("moving memory into huge pages")?;
    Ok(exit::OK)
}
