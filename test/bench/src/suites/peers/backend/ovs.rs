//! Open vSwitch on DPDK, with a database of its own and no system service.

use std::path::Path;
use std::process::Command;

use crate::harness::error::BenchError;
use crate::harness::ovs::{BRIDGE, Place, Switch, VSWITCHD};
use crate::harness::process;
use crate::suites::peers::case::{Case, LARGE_FRAME_BYTES, Load};
use crate::suites::peers::ports::{MAC_A, MAC_B};
use crate::suites::peers::trial::{Backend, NOT_MINE, Running, Trial};

/// How frames find their port.
pub enum Ovs {
    /// One OpenFlow rule for each direction.
    Flow,
    /// The action "normal": a learning switch.
    Normal,
}

impl Backend for Ovs {
    fn name(&self) -> &'static str {
        match self {
            Ovs::Flow => "ovs-flow",
            Ovs::Normal => "ovs-normal",
        }
    }

    fn needs(&self) -> &'static str {
        VSWITCHD
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        match case.load {
            Load::Flood { frame_bytes: LARGE_FRAME_BYTES } => {
                Some("drops plain frames above the MTU")
            }
            _ if !case.is_net() => NOT_MINE,
            _ => None,
        }
    }

    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError> {
        let Trial { bed, folder, .. } = *trial;
        let place =
            Place { poll_cpu: bed.back_cpu, main_cpu: bed.front_cpu, hugepages: bed.hugepages };
        let switch = Switch::start(self.name(), &place, folder)?;
        self.forward(folder, &switch.ctl)?;
        let [a, b] = &switch.ports;
        let load = trial.net_load(a, b);
        Ok(Running { processes: vec![switch.process, switch.database], load })
    }
}

impl Ovs {
    /// Tells it where frames go.
    fn forward(&self, folder: &Path, ctl: &Path) -> Result<(), BenchError> {
        let bridge = folder.join(format!("{BRIDGE}.mgmt")).display().to_string();
        match self {
            Ovs::Flow => {
                let ofctl = |args: &[&str]| process::run(Command::new("ovs-ofctl").args(args));
                ofctl(&["del-flows", &bridge])?;
                for flow in ["in_port=1,actions=output:2", "in_port=2,actions=output:1"] {
                    ofctl(&["add-flow", &bridge, flow])?;
                }
            }
            // A front end that only receives is never learned, and its frames would be flooded
            // through the slow path.
            Ovs::Normal => {
                for (port, mac) in [("a", MAC_A), ("b", MAC_B)] {
                    let mut command = Command::new("ovs-appctl");
                    command.arg(format!("--target={}", ctl.display()));
                    process::run(command.args(["fdb/add", BRIDGE, port, "0", mac]))?;
                }
            }
        }
        Ok(())
    }
}
