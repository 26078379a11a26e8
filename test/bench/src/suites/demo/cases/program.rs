//! A case made of one guest program, and the places where it runs.

use std::time::Duration;

use crate::harness::error::BenchError;
use crate::harness::runner::{Case, GRACE, Rate, Side, Spec, Window};
use crate::harness::stats::Better;

/// A place where a command can be run: a guest of each side.
pub trait Shell {
    /// Runs `script` in the guest that puts on the load and returns its standard output.
    fn run(&self, side: Side, script: &str, timeout: Duration) -> Result<String, BenchError>;
}

/// Makes the script that runs a load of some length.
pub(super) type Script = Box<dyn Fn(Window) -> String>;
/// Reads what the script wrote.
pub(super) type Parse = fn(&serde_json::Value) -> Option<Rate>;

/// A case made of one guest program that prints JSON.
pub struct Program<'a> {
    pub(super) spec: Spec,
    pub(super) shell: &'a dyn Shell,
    pub(super) script: Script,
    pub(super) parse: Parse,
}

impl Case for Program<'_> {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn run(&mut self, side: Side, window: Window) -> Result<Rate, BenchError> {
        let length = window.settle + window.length;
        let text = self.shell.run(side, &(self.script)(window), length + GRACE)?;
        read(&text, self.parse).ok_or_else(|| {
            let what = format!("{} on {}", self.spec.name, side.name());
            BenchError::lab(what, format!("the program's answer is not as expected: {text}"))
        })
    }
}

/// Programs may warn before their JSON; it begins at the first brace.
pub(super) fn read(text: &str, parse: Parse) -> Option<Rate> {
    let json = &text[text.find('{')?..];
    let mut values = serde_json::Deserializer::from_str(json).into_iter();
    parse(&values.next()?.ok()?)
}

/// Facts about the bed that rows must tell.
#[derive(Debug, Clone)]
pub struct Modes {
    /// How both network sides are set up.
    pub net: String,
    /// Whether guests with vhost-net are there, too.
    pub vhost: bool,
    /// How both disks are set up.
    pub disk: String,
    /// Address of the guest that answers the load.
    pub server: std::net::IpAddr,
    /// Disk in the guest that puts on the load.
    pub disk_path: String,
    /// Bytes of that disk.
    pub disk_len_bytes: u64,
}

/// A case with nothing set but its names.
pub(super) fn spec(name: &'static str, unit: &'static str, operation: &'static str) -> Spec {
    Spec {
        name,
        unit,
        operation,
        better: Better::Higher,
        target: None,
        aim: None,
        ours: "",
        peer: "",
        vhost: false,
        mode: String::new(),
        latency: false,
        settle: Duration::from_millis(600),
    }
}
