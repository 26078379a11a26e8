//! The configuration a daemon under test runs with.

use std::path::{Path, PathBuf};

/// Folder of a daemon's sockets, below the session's run folder.
pub(super) fn run_dir(base: &Path, name: &str) -> PathBuf {
    base.join(name)
}

/// A VM of the configuration. Options are lines of TOML, so that a test can say all that the
/// daemon knows, and wrong things too.
#[derive(Clone, Debug)]
pub struct Vm {
    name: String,
    text: String,
    ports: String,
}

impl Vm {
    /// A VM without ports; `options` such as `trust_domain = "t"`.
    #[must_use]
    pub fn new(name: &str, options: &str) -> Self {
        let text = format!("[[vm]]\nname = {name:?}\n{options}\n");
        Self { name: name.into(), text, ports: String::new() }
    }

    /// Adds a network port; `options` such as `switch = "lan"`.
    #[must_use]
    pub fn net(self, name: &str, options: &str) -> Self {
        self.port("[[vm.net]]", name, options)
    }

    /// Adds a disk; `options` such as `format = "memory"` and `size = "64MiB"` on two lines.
    #[must_use]
    pub fn disk(self, name: &str, options: &str) -> Self {
        self.port("[[vm.disk]]", name, options)
    }

    /// Adds vsock with a CID. Its host side is [`super::Daemon::vsock_path`].
    #[must_use]
    pub fn vsock(mut self, cid: u32) -> Self {
        self.ports
            .push_str(&format!("[vm.vsock]\ncid = {cid}\npath = \"@RUN@/{}.vsock\"\n", self.name));
        self
    }

    /// Adds tables of the VM, such as `[vm.pipes]`.
    #[must_use]
    pub fn more(mut self, tables: &str) -> Self {
        self.ports.push_str(tables);
        self
    }

    fn port(mut self, table: &str, name: &str, options: &str) -> Self {
        self.ports.push_str(&format!("{table}\nname = {name:?}\n{options}\n"));
        self
    }
}

/// Everything the configuration file says.
#[derive(Clone, Debug, Default)]
pub(super) struct Config {
    pub(super) daemon: String,
    pub(super) sidecore: String,
    pub(super) switches: String,
    pub(super) vms: Vec<Vm>,
    pub(super) more: String,
    pub(super) holder: bool,
}

impl Config {
    /// The file's text for a run folder.
    pub(super) fn text(&self, run_dir: &Path) -> String {
        let run = run_dir.display();
        let mut text = format!("[daemon]\nrun_dir = \"{run}\"\n{}\n", self.daemon);
        if self.holder {
            text.push_str(&format!("holder = \"{run}/holder.sock\"\n"));
        }
        text.push_str(&format!("[sidecore]\n{}\n{}", self.sidecore, self.switches));
        for vm in &self.vms {
            text.push_str(&vm.text);
            text.push_str(&vm.ports.replace("@RUN@", &run.to_string()));
        }
        text.push_str(&self.more);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_the_toml_that_was_meant() {
        let config = Config {
            sidecore: "spin_us = 5".into(),
            switches: "[[switch]]\nname = \"lan\"\n".into(),
            vms: vec![
                Vm::new("a", "weight = 2").net("n0", "switch = \"lan\"").vsock(3),
                Vm::new("b", "").disk("d0", "format = \"null\"\nsize = \"1GiB\""),
            ],
            holder: true,
            ..Config::default()
        };
        let got: toml::Table = config.text(Path::new("/r")).parse().unwrap();
        let want: toml::Table = r#"
            daemon = { run_dir = "/r", holder = "/r/holder.sock" }
            sidecore = { spin_us = 5 }
            switch = [{ name = "lan" }]
            vm = [
                { name = "a", weight = 2, net = [{ name = "n0", switch = "lan" }],
                  vsock = { cid = 3, path = "/r/a.vsock" } },
                { name = "b", disk = [{ name = "d0", format = "null", size = "1GiB" }] },
            ]
        "#
        .parse()
        .unwrap();
        assert_eq!(got, want);
    }
}
