//! QEMU's monitor protocol (QEMU documentation, `interop/qmp-spec`): one JSON object a line.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

/// Events kept until someone takes them; older ones are dropped.
const MAX_EVENTS: usize = 1024;

/// A monitor connection.
#[derive(Debug)]
pub(crate) struct Qmp {
    from: BufReader<UnixStream>,
    to: UnixStream,
    greeted: bool,
    events: Vec<Value>,
}

impl Qmp {
    pub(crate) fn new(stream: UnixStream) -> std::io::Result<Self> {
        let to = stream.try_clone()?;
        Ok(Self { from: BufReader::new(stream), to, greeted: false, events: Vec::new() })
    }

    /// Runs one command; the error is text for [`crate::LabError::Qmp`].
    pub(crate) fn run(
        &mut self,
        command: &str,
        arguments: &Value,
        time: Duration,
    ) -> Result<Value, String> {
        self.from.get_ref().set_read_timeout(Some(time)).map_err(|error| error.to_string())?;
        if !self.greeted {
            let greeting = self.line()?;
            if greeting.get("QMP").is_none() {
                return Err(format!("no QMP greeting but {greeting}"));
            }
            self.greeted = true;
            self.exchange("qmp_capabilities", &json!({}))?;
        }
        self.exchange(command, arguments)
    }

    /// Events seen since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    fn exchange(&mut self, command: &str, arguments: &Value) -> Result<Value, String> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.to.write_all(line.as_bytes()).map_err(|error| error.to_string())?;
        loop {
            let mut answer = self.line()?;
            if answer.get("event").is_some() {
                if self.events.len() >= MAX_EVENTS {
                    self.events.remove(0);
                }
                self.events.push(answer);
            } else if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            } else {
                return Err(answer.to_string());
            }
        }
    }

    fn line(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(0) => Err("QEMU closed the monitor".into()),
            Ok(_) => serde_json::from_str(&line).map_err(|error| format!("{error}: {line}")),
            Err(error) => Err(format!("no answer: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_between_command_and_answer_are_kept() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut qmp = Qmp::new(ours).unwrap();
        let qemu = std::thread::spawn(move || {
            let mut to = theirs.try_clone().unwrap();
            let mut lines = BufReader::new(theirs).lines();
            to.write_all(b"{\"QMP\": {}}\n").unwrap();
            lines.next().unwrap().unwrap();
            to.write_all(b"{\"return\": {}}\n").unwrap();
            let asked = lines.next().unwrap().unwrap();
            to.write_all(b"{\"event\": \"STOP\"}\n{\"return\": {\"x\": 1}}\n").unwrap();
            lines.next().unwrap().unwrap();
            to.write_all(b"{\"error\": {\"desc\": \"no\"}}\n").unwrap();
            asked
        });
        let time = Duration::from_secs(60);
        assert_eq!(qmp.run("stop", &json!({"a": 2}), time).unwrap(), json!({"x": 1}));
        assert_eq!(qmp.take_events(), [json!({"event": "STOP"})]);
        assert!(qmp.run("bad", &json!({}), time).unwrap_err().contains("no"));
        let asked: Value = serde_json::from_str(&qemu.join().unwrap()).unwrap();
        assert_eq!(asked, json!({"execute": "stop", "arguments": {"a": 2}}));
        assert!(qmp.run("x", &json!({}), time).is_err());
    }
}
