//! The host kernel's own back end of virtio network cards, vhost-net.
//!
//! QEMU hands it the rings of a card on a TAP (`vhost=on`), and a thread of the kernel serves them.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;

use rustix::ioctl::{NoArg, Opcode, ioctl, opcode};

/// The kernel's device.
const DEVICE: &str = "/dev/vhost-net";
/// `VHOST_SET_OWNER` of `linux/vhost.h`: starts the kernel's thread.
const SET_OWNER: Opcode = opcode::none(0xAF, 0x01);

/// Whether this host has vhost-net and gives it to this process; if not, the reason.
///
/// # Errors
/// The reason.
pub fn vhost_net() -> Result<(), String> {
    is_usable(DEVICE)
}

fn is_usable(device: &str) -> Result<(), String> {
    let failed = |what: &str, error: io::Error| format!("{what} {device}: {error}");
    let file =
        File::options().read(true).write(true).open(device).map_err(|e| failed("open", e))?;
    // SAFETY: this operation takes no argument, so the kernel touches no memory of ours.
    let owned = unsafe { ioctl(file.as_fd(), NoArg::<SET_OWNER>::new()) };
    owned.map_err(|e| failed("start a thread of", e.into()))
}

/// Threads of the kernel that serve the cards of a QEMU and that are no threads of that process, as
/// on kernels before 6.4.
#[must_use]
pub fn vhost_threads(qemu: u32) -> Vec<u32> {
    let name = format!("vhost-{qemu}");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    processes.filter_map(number).filter(|pid| is_named(*pid, &name)).collect()
}

fn is_named(pid: u32, name: &str) -> bool {
    // One that ended meanwhile has no name.
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_it_says_why() {
        let reason = is_usable("/dev/no-such-device").unwrap_err();
        assert!(reason.starts_with("open /dev/no-such-device: No such file"), "{reason}");
        let reason = is_usable("/dev/null").unwrap_err();
        assert!(reason.starts_with("start a thread of /dev/null: Inappropriate"), "{reason}");
    }

    #[test]
    fn a_process_has_the_name_that_it_has() {
        let own = fs::read_to_string("/proc/self/comm").unwrap();
        assert!(is_named(std::process::id(), own.trim_end()));
        assert!(!is_named(std::process::id(), "vhost-1"));
        assert!(vhost_threads(u32::MAX).is_empty());
    }
}
