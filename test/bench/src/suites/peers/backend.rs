//! The back ends: how each is started for a case.

use super::trial::{Backend, OURS};

mod fio;
mod millrace;
mod ovs;
mod qsd;
mod spdk;
mod tap;
mod testpmd;
mod vpp;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::peers::case;
    use crate::suites::peers::case::Case;

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
