//! VPP with two vhost-user interfaces, cross-connected. Debian does not carry it.

use std::path::Path;

use crate::harness::error::BenchError;
use crate::harness::process;
use crate::suites::peers::bed::Bed;
use crate::suites::peers::case::{Case, Ring};
use crate::suites::peers::trial::{Backend, NOT_MINE, Running, Trial};

/// One worker.
pub struct Vpp;

impl Backend for Vpp {
    fn name(&self) -> &'static str {
        "vpp"
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        match case.is_net() {
            false => NOT_MINE,
            true => (case.ring == Ring::InOrder).then_some("has no in-order rings"),
        }
    }

    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError> {
        let Trial { bed, case, folder, .. } = *trial;
        let (a, b) = trial.sockets();
        for (name, text) in
            [("startup.conf", startup(bed, folder)), ("ports.cli", commands(case, &a, &b))]
        {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(|e| BenchError::file("write", &path, e))?;
        }
        let mut command = process::command("vpp", None);
        command.arg("-c").arg(folder.join("startup.conf"));
        trial.launch_net(self.name(), &mut command)
    }
}

fn startup(bed: &Bed, folder: &Path) -> String {
    let dir = folder.display();
    format!(
        "unix {{ nodaemon runtime-dir {dir} cli-listen {dir}/cli.sock exec {dir}/ports.cli }}\n\
         cpu {{ main-core {} corelist-workers {} }}\n\
         api-segment {{ prefix millrace-bench }}\n\
         statseg {{ socket-name {dir}/stats.sock }}\n\
         buffers {{ buffers-per-numa 32768 }}\n\
         plugins {{ plugin dpdk_plugin.so {{ disable }} }}\n",
        bed.front_cpu, bed.back_cpu
    )
}

fn commands(case: &Case, a: &Path, b: &Path) -> String {
    let packed = if case.ring == Ring::Packed { " packed" } else { "" };
    let mut text = String::new();
    for socket in [a, b] {
        text += &format!("create vhost-user socket {} server{packed}\n", socket.display());
    }
    let port = |n: u32| format!("VirtualEthernet0/0/{n}");
    for (from, to) in [(0, 1), (1, 0)] {
        let (from, to) = (port(from), port(to));
        text += &format!("set interface state {from} up\nset interface l2 xconnect {from} {to}\n");
        text += &format!("set interface rx-mode {from} polling\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::peers::case;

    #[test]
    fn both_ways_are_connected_and_packed_rings_offered_when_asked() {
        let case = |name: &str| case::ALL.into_iter().find(|c| c.name() == name).unwrap();
        let (a, b) = (Path::new("/t/a"), Path::new("/t/b"));
        let text = commands(&case("rr64_packed"), a, b);
        assert!(text.starts_with("create vhost-user socket /t/a server packed\n"), "{text}");
        assert!(text.contains("l2 xconnect VirtualEthernet0/0/1 VirtualEthernet0/0/0\n"), "{text}");
        assert!(!commands(&case("rr64_split"), a, b).contains("packed"));
        assert!(startup(&Bed::pretend(), a).contains("main-core 1 corelist-workers 0"));
    }
}
