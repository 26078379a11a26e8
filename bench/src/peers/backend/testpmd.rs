//! DPDK's testpmd with two ports of its vhost driver.

use std::path::Path;

use crate::error::BenchError;
use crate::peers::Bed;
use crate::peers::case::Case;
use crate::peers::front::{self, Window};
use crate::peers::process::{self, Process};

use super::{Backend, MAC_A, MAC_B, NOT_MINE, Running, dpdk_memory, ports};

/// Packet buffers: rings, caches and 64 KiB frames in pieces of 2 KiB.
const BUFFERS: &str = "32768";

/// Its forwarding modes.
pub enum Testpmd {
    /// From one port to the other, untouched.
    Io,
    /// The same, with new MAC addresses.
    Mac,
}

impl Testpmd {
    fn mode(&self) -> &'static str {
        match self {
            Testpmd::Io => "io",
            Testpmd::Mac => "mac",
        }
    }
}

impl Backend for Testpmd {
    fn name(&self) -> &'static str {
        match self {
            Testpmd::Io => "testpmd-io",
            Testpmd::Mac => "testpmd-mac",
        }
    }

    fn needs(&self) -> &'static str {
        "dpdk-testpmd"
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        if case.is_net() { None } else { NOT_MINE }
    }

    fn start(
        &self,
        bed: &Bed,
        case: &Case,
        window: Window,
        folder: &Path,
    ) -> Result<Running, BenchError> {
        let (a, b) = ports(folder);
        let mut command = process::command(self.needs(), None);
        // The main core sleeps, so it may share the front end's CPU.
        command.arg(format!("--lcores=0@{},1@{}", bed.front_cpu, bed.back_cpu));
        command.args(["--main-lcore=0", "--no-pci", "--file-prefix=millrace-bench"]);
        command.args(dpdk_memory(bed.hugepages)).env("RUNTIME_DIRECTORY", folder);
        for (i, socket) in [&a, &b].into_iter().enumerate() {
            command.arg(format!("--vdev=net_vhost{i},iface={},queues=1", socket.display()));
        }
        command.args(["--", "--nb-cores=1", "--auto-start", "--no-mlockall"]);
        command.arg(format!("--forward-mode={}", self.mode()));
        command.arg(format!("--total-num-mbufs={BUFFERS}"));
        command.arg(format!("--eth-peer=0,{MAC_A}")).arg(format!("--eth-peer=1,{MAC_B}"));
        let mut testpmd = Process::start(self.name(), &mut command, folder)?;
        testpmd.wait_listening(&[&a, &b])?;
        let load = front::net(bed, case, window, &a, &b);
        Ok(Running { processes: vec![testpmd], load })
    }
}
