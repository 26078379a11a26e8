//! Open vSwitch on DPDK, with a database of its own and no system service.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::error::BenchError;
use crate::harness::process::{self, Process};

/// Debian keeps the build with DPDK beside the other.
pub const VSWITCHD: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// Name of the bridge, and of its management socket.
pub const BRIDGE: &str = "mrbench0";

/// CPUs and memory of a switch.
pub struct Place {
    /// CPU of its polling thread.
    pub poll_cpu: usize,
    /// CPU of its other threads.
    pub main_cpu: usize,
    /// Whether its buffers are in huge pages.
    pub hugepages: bool,
}

/// A running switch with two vhost-user ports; its action is "normal" until it is told another.
pub struct Switch {
    /// Itself.
    pub process: Process,
    /// Database of the switch.
    pub database: Process,
    /// Socket of its control commands.
    pub ctl: PathBuf,
    /// The sockets of its ports, which it listens at.
    pub ports: [PathBuf; 2],
}

impl Switch {
    /// Starts it in a folder; returns when the ports' sockets listen.
    pub fn start(name: &str, place: &Place, folder: &Path) -> Result<Switch, BenchError> {
        let (db, ctl) = (folder.join("db.sock"), folder.join("vs.ctl"));
        let database = database(folder, &db)?;
        vsctl(&db, &["--no-wait", "init"])?;
        let mut set =
            vec!["--no-wait".to_string(), "set".into(), "Open_vSwitch".into(), ".".into()];
        set.extend(dpdk_settings(place).iter().map(|s| format!("other_config:{s}")));
        vsctl(&db, &set)?;
        let mut command = process::command("unshare", None);
        // Its TAP devices belong to nobody else.
        command.args(["--net", VSWITCHD]).arg(format!("unix:{}", db.display()));
        command.arg(format!("--unixctl={}", ctl.display()));
        environment(&mut command, folder);
        let mut process = process::launch(name, &mut command, folder, &[&ctl])?;
        vsctl(&db, &bridge())?;
        // Ports are named by their sockets, which are in the run folder.
        let ports = [folder.join("a"), folder.join("b")];
        process.wait_listening(&[&ports[0], &ports[1]])?;
        Ok(Switch { process, database, ctl, ports })
    }
}

/// Arguments of DPDK's memory: huge pages without files, or none.
pub fn dpdk_memory(hugepages: bool) -> &'static [&'static str] {
    match hugepages {
        true => &["--in-memory"],
        false => &["--in-memory", "--no-huge", "-m", "512"],
    }
}

fn database(folder: &Path, socket: &Path) -> Result<Process, BenchError> {
    let file = folder.join("conf.db");
    process::run(Command::new("ovsdb-tool").arg("create").arg(&file).arg(SCHEMA))?;
    let mut command = process::command("ovsdb-server", None);
    command.arg(format!("--remote=punix:{}", socket.display()));
    command.arg(format!("--unixctl={}", folder.join("db.ctl").display())).arg(&file);
    environment(&mut command, folder);
    process::launch("ovsdb-server", &mut command, folder, &[socket])
}

/// Keeps all of its files in our folder.
fn environment(command: &mut Command, folder: &Path) {
    for name in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "RUNTIME_DIRECTORY"] {
        command.env(name, folder);
    }
}

fn vsctl<S: AsRef<std::ffi::OsStr>>(db: &Path, args: &[S]) -> Result<String, BenchError> {
    let mut command = Command::new("ovs-vsctl");
    command.arg(format!("--db=unix:{}", db.display())).arg("--timeout=15");
    process::run(command.args(args))
}

fn dpdk_settings(place: &Place) -> Vec<String> {
    let mask = |cpu: usize| format!("{:#x}", 1u64 << cpu);
    let mut settings = vec![
        "dpdk-init=true".into(),
        format!("dpdk-lcore-mask={}", mask(place.main_cpu)),
        format!("pmd-cpu-mask={}", mask(place.poll_cpu)),
        format!("dpdk-extra=\"--no-pci {}\"", dpdk_memory(place.hugepages).join(" ")),
    ];
    // Its default, 1 GiB, may be more than we reserved.
    settings.extend(place.hugepages.then(|| "dpdk-socket-mem=256".into()));
    settings
}

/// One command, so that it is done when it returns.
fn bridge() -> Vec<String> {
    let mut words = format!("add-br {BRIDGE} -- set bridge {BRIDGE} datapath_type=netdev");
    for (number, port) in [(1, "a"), (2, "b")] {
        words += &format!(
            " -- add-port {BRIDGE} {port} -- set Interface {port} type=dpdkvhostuser \
             ofport_request={number}"
        );
    }
    words.split_whitespace().map(Into::into).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_poll_thread_on_the_back_ends_cpu() {
        let place = Place { poll_cpu: 4, main_cpu: 1, hugepages: true };
        assert_eq!(
            dpdk_settings(&place),
            [
                "dpdk-init=true",
                "dpdk-lcore-mask=0x2",
                "pmd-cpu-mask=0x10",
                "dpdk-extra=\"--no-pci --in-memory\"",
                "dpdk-socket-mem=256"
            ]
        );
        assert!(bridge().ends_with(&["type=dpdkvhostuser".into(), "ofport_request=2".into()]));
    }
}
