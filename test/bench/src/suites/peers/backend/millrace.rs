//! Millrace's daemon, with one sidecore that does not sleep.

use std::path::Path;

use crate::harness::daemon::{self, POLLS_ON_US};
use crate::harness::error::BenchError;
use crate::suites::peers::bed::Bed;
use crate::suites::peers::case::{Case, Image, LARGE_FRAME_BYTES, Load, Medium, OURS_RAW};
use crate::suites::peers::images::Disk;
use crate::suites::peers::ports::{IP_A, IP_B, MAC_A, MAC_B, sockets};
use crate::suites::peers::trial::{Backend, NOT_MINE, OURS, Running, Trial};

/// The daemon, pinned and polling on; the switch and its checks as by default.
pub enum Millrace {
    /// Settings as each case says.
    Shipped,
    /// With a raw disk, in cases of images: what the format costs.
    Raw,
}

impl Backend for Millrace {
    fn name(&self) -> &'static str {
        match self {
            Millrace::Shipped => OURS,
            Millrace::Raw => OURS_RAW,
        }
    }

    fn needs(&self) -> &'static str {
        // The bed has found it.
        "setpriv"
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        match self {
            Millrace::Raw if case.image() != Some(Image::Mapped) => NOT_MINE,
            _ => None,
        }
    }

    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError> {
        let Trial { bed, case, folder, .. } = *trial;
        let (a, b) = trial.sockets();
        let (sockets, load): (&[&Path], _) = if case.is_net() {
            (&[&a, &b], trial.net_load(&a, &b))
        } else {
            (&[&a], trial.disk_load(&a))
        };
        let format = match self {
            Millrace::Shipped => "qcow2",
            Millrace::Raw => "raw",
        };
        let config = match case.image() {
            Some(_) => disk_text(bed, folder, &image(&bed.disk(case)?, format, case)),
            None => text(bed, case, folder),
        };
        let daemon = daemon::start(&bed.millrace, &config, folder, sockets)?;
        Ok(Running { processes: vec![daemon], load })
    }
}

fn text(bed: &Bed, case: &Case, folder: &Path) -> String {
    let (a, b) = sockets(folder);
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
    disk_text(bed, folder, &disk)
}

fn disk_text(bed: &Bed, folder: &Path, disk: &str) -> String {
    let (head, a) = (daemon::head(folder, bed.back_cpu, Some(POLLS_ON_US)), sockets(folder).0);
    format!("{head}[[vm]]\nname = \"a\"\n[[vm.disk]]\nname = \"d\"\n{disk}\nsocket = {a:?}\n")
}

/// The disk of a case with an image.
fn image(disk: &Disk, format: &str, case: &Case) -> String {
    let backing = match disk.base.as_ref().and_then(|b| b.parent()) {
        Some(folder) => format!("\nbacking_dir = {folder:?}"),
        None => String::new(),
    };
    let (path, read_only) = (&disk.path, !case.writes());
    format!(
        "format = \"{format}\"\npath = {path:?}\ndirect = false\nread_only = {read_only}{backing}"
    )
}

fn raw(path: &Path, direct: bool) -> String {
    format!("format = \"raw\"\npath = {path:?}\ndirect = {direct}\nread_only = true")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::peers::case;

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

    #[test]
    fn an_image_is_a_disk_that_the_daemon_takes() {
        let text = |name: &str, base: Option<&str>, format| {
            let case = case::ALL.into_iter().find(|c| c.name() == name).unwrap();
            let disk = Disk { path: "/t/live".into(), base: base.map(Into::into) };
            let text = disk_text(&Bed::pretend(), Path::new("/t/0"), &image(&disk, format, &case));
            config::parse(Path::new("m.toml"), &text).unwrap();
            text
        };
        let golden = "format = \"qcow2\"\npath = \"/t/live\"\ndirect = false\nread_only = false\n";
        assert!(text("qcow2_alloc_4k_d1", None, "qcow2").contains(golden));
        let backed = text("qcow2_backed_4k_d1", Some("/t/base.raw"), "qcow2");
        assert!(backed.contains(&format!("{golden}backing_dir = \"/t\"\n")), "{backed}");
        let raw = text("qcow2_read_4k_d1", None, "raw");
        assert!(raw.contains("format = \"raw\"\n") && raw.contains("read_only = true\n"), "{raw}");
    }
}
