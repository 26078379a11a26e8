//! Our own daemon, with one sidecore that does not sleep.

use std::path::Path;

use crate::daemon::{self, POLLS_ON_US};
use crate::error::BenchError;
use crate::peers::Bed;
use crate::peers::case::{Case, LARGE_FRAME_BYTES, Load, Medium};
use crate::peers::front::{self, Window};

use super::{Backend, IP_A, IP_B, MAC_A, MAC_B, OURS, Running, ports};

/// The daemon, pinned and polling on; the switch and its checks as by default.
pub struct Millrace;

impl Backend for Millrace {
    fn name(&self) -> &'static str {
        OURS
    }

    fn needs(&self) -> &'static str {
        // The bed has found it.
        "setpriv"
    }

    fn refuses(&self, _: &Case) -> Option<&'static str> {
        None
    }

    fn start(
        &self,
        bed: &Bed,
        case: &Case,
        window: Window,
        folder: &Path,
    ) -> Result<Running, BenchError> {
        let (a, b) = ports(folder);
        let (sockets, load): (&[&Path], _) = if case.is_net() {
            (&[&a, &b], front::net(bed, case, window, &a, &b))
        } else {
            (&[&a], front::disk(bed, case, window, &a))
        };
        let config = text(bed, case, folder);
        let daemon = daemon::start(&bed.millrace, &config, folder, sockets)?;
        Ok(Running { processes: vec![daemon], load })
    }
}

fn text(bed: &Bed, case: &Case, folder: &Path) -> String {
    let (a, b) = ports(folder);
    let head = daemon::head(folder, bed.back_cpu, Some(POLLS_ON_US));
    let disk = match case.load {
        Load::Read { medium: Medium::Null, .. } => "format = \"null\"\nsize = \"1TiB\"".into(),
        Load::Read { medium: Medium::Tmpfs, .. } => raw(&bed.tmpfs_file, false),
        Load::Read { medium: Medium::Disk, .. } => raw(&bed.disk_file, true),
        _ => {
            // Frames above the MTU are dropped where no segmentation offload is asked for.
            let long = case.load == Load::Flood { frame_bytes: LARGE_FRAME_BYTES };
            let mtu = if long { u16::MAX } else { 1500 };
            let vm = |name, mac, ip, socket| {
                format!(
                    "[[vm]]\nname = \"{name}\"\n[[vm.net]]\nname = \"net0\"\nswitch = \"lan\"\n\
                     mtu = {mtu}\nmac = \"{mac}\"\naddresses = [\"{ip}\"]\nbind = \"mac-and-ip\"\n\
                     socket = {socket:?}\n"
                )
            };
            let both = vm("a", MAC_A, IP_A, a) + &vm("b", MAC_B, IP_B, b);
            return format!("{head}[[switch]]\nname = \"lan\"\n{both}");
        }
    };
    format!("{head}[[vm]]\nname = \"a\"\n[[vm.disk]]\nname = \"d\"\n{disk}\nsocket = {a:?}\n")
}

fn raw(path: &Path, direct: bool) -> String {
    format!("format = \"raw\"\npath = {path:?}\ndirect = {direct}\nread_only = true")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::case;

    #[test]
    fn addresses_are_bound_and_the_sidecore_is_pinned() {
        let case = case::ALL.into_iter().find(|c| c.name() == "flood64_split").unwrap();
        let text = text(&Bed::pretend(), &case, Path::new("/t/0"));
        for golden in [
            "run_dir = \"/t/0\"\n",
            "cpus = [0]\nspin_us = 10000\n",
            "mac = \"02:00:00:00:00:0b\"\naddresses = [\"10.99.0.11\"]\nbind = \"mac-and-ip\"\n\
             socket = \"/t/0/b.sock\"\n",
        ] {
            assert!(text.contains(golden), "lacks {golden}: {text}");
        }
    }

    #[test]
    fn the_disk_goes_past_the_cache_and_the_tmpfs_file_does_not() {
        let text = |name: &str| {
            let case = case::ALL.into_iter().find(|c| c.name() == name).unwrap();
            text(&Bed::pretend(), &case, Path::new("/t/0"))
        };
        assert!(text("disk_d1").contains("path = \"/t/disk.raw\"\ndirect = true\n"));
        assert!(text("tmpfs_d1").contains("path = \"/t/shm/disk.raw\"\ndirect = false\n"));
        assert!(text("null_d1").contains("format = \"null\"\n"));
    }
}
