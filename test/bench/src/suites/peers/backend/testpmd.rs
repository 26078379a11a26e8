//! DPDK's testpmd with two ports of its vhost driver.

use crate::harness::error::BenchError;
use crate::harness::ovs::dpdk_memory;
use crate::harness::process;
use crate::suites::peers::case::Case;
use crate::suites::peers::ports::{MAC_A, MAC_B};
use crate::suites::peers::trial::{Backend, NOT_MINE, Running, Trial};

/// Packet buffers: rings, caches and 64 KiB frames in pieces of 2 KiB.
const BUFFERS: &str = "32768";

/// Back end of testpmd, by its forwarding mode.
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

    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError> {
        let Trial { bed, folder, .. } = *trial;
        let (a, b) = trial.sockets();
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
        trial.launch_net(self.name(), &mut command)
    }
}
