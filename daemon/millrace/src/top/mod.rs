//! `millrace top`: what the daemon's VMs, ports and sidecores do now.
//!
//! It asks for the status, twice an interval apart, and shows the difference: [`sample`] is one
//! answer, [`view`] what happened between two, [`pages`] the tables, [`draw`] the screen, [`live`]
//! the terminal.

mod draw;
mod live;
mod pages;
mod sample;
mod view;

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use control::client::Client;

use self::sample::Sample;
use self::view::View;
use crate::cli::Top;
use crate::exit;
use crate::process::{print, print_line};

/// A sample, or why there is none.
type Taken = anyhow::Result<Sample>;

/// Source of samples: the daemon.
#[derive(Debug, Clone)]
pub struct Source(Client);

impl Source {
    /// Asks the daemon. A refusal is an error with its text.
    fn take(&self) -> Taken {
        let answer = self.0.request("GET", "/v1/status", None)?;
        // The counters were read before the answer was sent: closer to now than to the question.
        let at = Instant::now();
        if !answer.is_success() {
            return Err(anyhow!("the daemon refused: {}", answer.error()));
        }
        let status = serde_json::from_str(&answer.body).context("the daemon's status")?;
        Ok(Sample { at, status })
    }
}

/// `top`.
pub fn run(args: &Top) -> anyhow::Result<u8> {
    let source = Source(Client::new(&args.socket.socket));
    let interval = Duration::from_millis(args.interval_ms.into());
    let first = source.take()?;
    if !args.once && !args.json {
        live::run(source, first, interval)?;
        return Ok(exit::OK);
    }
    std::thread::sleep(interval);
    let view = View::between(&first, &source.take()?);
    if args.json {
        print_line(&serde_json::to_string_pretty(&view)?)?;
    } else {
        print(&draw::plain(&view))?;
    }
    Ok(exit::OK)
}
