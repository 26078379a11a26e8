//! The back ends: how each is started for a case.

use std::path::{Path, PathBuf};

use crate::error::BenchError;

use super::Bed;
use super::case::Case;
use super::front::{Program, Window};
use super::process::Process;

mod fio;
mod millrace;
pub(crate) mod ovs;
mod qsd;
mod spdk;
mod tap;
mod testpmd;
mod vpp;

/// MAC address of the front end's first port.
pub(super) const MAC_A: &str = "02:00:00:00:00:0a";
/// Of its second.
pub(super) const MAC_B: &str = "02:00:00:00:00:0b";
/// IPv4 address of its first port.
pub(super) const IP_A: &str = "10.99.0.10";
/// Of its second.
pub(super) const IP_B: &str = "10.99.0.11";

/// A back end that has been started for one load, and that load.
pub struct Running {
    /// Its processes; killed when dropped.
    pub processes: Vec<Process>,
    /// What puts the load on it.
    pub load: Program,
}

/// One implementation in one configuration.
pub trait Backend {
    /// Its name in results.
    fn name(&self) -> &'static str;

    /// Whether it is measured without vhost-user, for orientation.
    fn is_reference(&self) -> bool {
        false
    }

    /// The program that it needs and this machine may not have.
    fn needs(&self) -> &'static str;

    /// What a case asks of it that it cannot do; none when it can. `Some("")` where the case is
    /// none of its business at all.
    fn refuses(&self, case: &Case) -> Option<&'static str>;

    /// Starts it in `folder` and returns when it is ready for the load.
    fn start(
        &self,
        bed: &Bed,
        case: &Case,
        window: Window,
        folder: &Path,
    ) -> Result<Running, BenchError>;
}

/// Millrace's name among the back ends.
pub const OURS: &str = "millrace";

/// Every back end, ours first.
pub fn all() -> Vec<Box<dyn Backend>> {
    vec![
        Box::new(millrace::Millrace::Shipped),
        Box::new(millrace::Millrace::Raw),
        Box::new(testpmd::Testpmd::Io),
        Box::new(testpmd::Testpmd::Mac),
        Box::new(ovs::Ovs::Flow),
        Box::new(ovs::Ovs::Normal),
        Box::new(vpp::Vpp),
        Box::new(tap::TapBridge::default()),
        Box::new(qsd::Qsd::Null),
        Box::new(qsd::Qsd::IoUring),
        Box::new(qsd::Qsd::Threads),
        Box::new(spdk::Spdk),
        Box::new(fio::Fio),
    ]
}

/// All names, for messages.
pub fn names(all: &[Box<dyn Backend>]) -> String {
    all.iter().map(|b| b.name()).collect::<Vec<_>>().join(", ")
}

/// Ours and the wanted peers, each wanted by its name or the start of it; all when none is wanted.
/// A name that fits none is the error.
pub fn select<'a>(
    all: &'a [Box<dyn Backend>],
    wanted: &[String],
) -> Result<Vec<&'a dyn Backend>, String> {
    let fits = |b: &dyn Backend, w: &str| b.name().starts_with(w);
    if let Some(w) = wanted.iter().find(|w| !all.iter().any(|b| fits(b.as_ref(), w))) {
        return Err(w.clone());
    }
    let chosen = |b: &&dyn Backend| {
        wanted.is_empty() || b.name() == OURS || wanted.iter().any(|w| fits(*b, w))
    };
    Ok(all.iter().map(AsRef::as_ref).filter(chosen).collect())
}

/// Where the two ports' sockets are in a folder.
fn ports(folder: &Path) -> (PathBuf, PathBuf) {
    (folder.join("a.sock"), folder.join("b.sock"))
}

/// DPDK's words for its memory: huge pages without files, or none.
pub(super) fn dpdk_memory(hugepages: bool) -> &'static [&'static str] {
    match hugepages {
        true => &["--in-memory"],
        false => &["--in-memory", "--no-huge", "-m", "512"],
    }
}

/// The answer of those that are for the network, to a disk's case and the other way round.
const NOT_MINE: Option<&str> = Some("");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::case;

    fn who(case: &Case) -> Vec<&'static str> {
        let all = all();
        all.iter().filter(|b| b.refuses(case).is_none()).map(|b| b.name()).collect()
    }

    #[test]
    fn every_case_has_its_peers_and_us() {
        let case = |name: &str| case::ALL.into_iter().find(|c| c.name() == name).unwrap();
        let net = ["millrace", "testpmd-io", "testpmd-mac", "ovs-flow", "ovs-normal", "vpp"];
        assert_eq!(who(&case("flood64_packed")), net);
        assert_eq!(who(&case("rr64_split")), [&net[..], &["tap-bridge"]].concat());
        assert_eq!(
            who(&case("flood64k_split")),
            ["millrace", "testpmd-io", "testpmd-mac", "vpp", "tap-bridge"]
        );
        assert_eq!(who(&case("null_d1")), ["millrace", "qsd", "spdk"]);
        assert_eq!(who(&case("tmpfs_d1")), ["millrace", "qsd-uring", "qsd-threads"]);
        let qsd = ["qsd-uring", "qsd-threads"];
        let mapped = [&["millrace", "ours-raw"][..], &qsd].concat();
        assert_eq!(who(&case("qcow2_read_4k_d1")), mapped);
        assert_eq!(who(&case("qcow2_write_1m_d8")), mapped);
        assert_eq!(who(&case("qcow2_alloc_4k_d32")), [&["millrace"][..], &qsd].concat());
        assert_eq!(who(&case("qcow2_backed_64k_d1")), [&["millrace"][..], &qsd].concat());
        assert_eq!(who(&case("disk_d32")), ["millrace", "qsd-uring", "qsd-threads", "spdk", "fio"]);
    }

    #[test]
    fn we_are_always_among_the_chosen() {
        let all = all();
        let names = |wanted: &[&str]| -> Result<Vec<&str>, String> {
            let wanted: Vec<String> = wanted.iter().map(|w| w.to_string()).collect();
            Ok(select(&all, &wanted)?.iter().map(|b| b.name()).collect())
        };
        assert_eq!(names(&["ovs"]).unwrap(), ["millrace", "ovs-flow", "ovs-normal"]);
        assert_eq!(names(&[]).unwrap().len(), all.len());
        assert_eq!(names(&["snabb"]).unwrap_err(), "snabb");
    }
}
