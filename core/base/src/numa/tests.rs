//! Fake machines, and the memory of this one.

use std::path::PathBuf;

use rustix::mm::{MapFlags, ProtFlags};

use super::*;
use crate::shm::SharedMemory;

const LEN: usize = 1 << 20;

/// A folder of nodes; removed when dropped.
pub(super) struct Fake(PathBuf);

impl Fake {
    pub(super) fn new(name: &str, lists: &[(&str, &str)]) -> Self {
        let root = std::env::temp_dir().join(format!("numa-{name}-{}", std::process::id()));
        for (node, list) in lists {
            std::fs::create_dir_all(root.join(node)).unwrap();
            std::fs::write(root.join(node).join("cpulist"), list).unwrap();
        }
        std::fs::create_dir_all(root.join("power")).unwrap();
        std::fs::write(root.join("online"), "0-1\n").unwrap();
        Self(root)
    }

    pub(super) fn nodes(&self) -> Nodes {
        Nodes::read(&self.0)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn cpus_have_the_node_that_lists_them() {
    let lists = [("node0", "0-3,8-11\n"), ("node1", "4-7,12\n"), ("node2", "\n")];
    let nodes = Fake::new("two", &lists).nodes();
    assert!(!nodes.is_one());
    let of = |cpu| nodes.of_cpus(&[cpu]);
    assert_eq!([of(0), of(3), of(9), of(4), of(12)].map(Option::unwrap), [0, 0, 0, 1, 1]);
    assert_eq!((of(13), nodes.of_cpus(&[])), (None, None));
    let several = [&[4, 12, 7][..], &[0, 1, 4], &[0, 13]].map(|cpus| nodes.of_cpus(cpus));
    assert_eq!(several, [Some(1), None, None]);
}

#[test]
fn a_machine_without_a_list_has_one_node() {
    let nodes = Nodes::read(Path::new("/nowhere/at/all"));
    assert!(nodes.is_one());
    assert_eq!((nodes.of_cpus(&[5, 7]), nodes.of_cpus(&[])), (Some(0), Some(0)));
    assert_eq!(Fake::new("none", &[]).nodes(), nodes);
}

#[test]
fn lists_that_make_no_sense_name_nobody() {
    assert_eq!(cpus_of("0-1,x,5-,7,9-8,0-99999999999,-\n"), [0, 1, 7]);
    assert_eq!(cpus_of(""), []);
}

#[test]
fn two_thirds_are_most() {
    let spread = |bytes: [u64; 2]| {
        let mut sum = Spread::default();
        let both = bytes.iter().zip(0..).map(|(&len, node)| Spread::on(node, len));
        both.for_each(|one| sum.add(&one));
        sum
    };
    assert_eq!(Spread::default().most(), None);
    assert_eq!(spread([0, 0]).most(), None);
    assert_eq!(spread([3, 0]).most(), Some(0));
    assert_eq!(spread([100, 200]).most(), Some(1));
    assert_eq!(spread([101, 199]).most(), None);
    assert_eq!(spread([u64::MAX, u64::MAX]).most(), None);
}

#[test]
fn samples_are_few_in_range_and_others_each_time() {
    for pages in [0u64, 1, 63, 64, 65, 1000, 1 << 30] {
        let mut seen = std::collections::BTreeSet::new();
        for turn in 0..32 {
            let all = samples(std::ptr::null(), pages * PAGE_BYTES, turn);
            assert!(all.len() as u64 <= SAMPLES.min(pages));
            assert!(pages < SAMPLES || all.len() as u64 >= SAMPLES / 2, "{} of {pages}", all.len());
            assert!(all.iter().all(|a| (a.addr() as u64) < pages * PAGE_BYTES));
            seen.extend(all.into_iter().map(<*const u8>::addr));
        }
        assert!(seen.len() as u64 >= pages.min(16 * SAMPLES));
    }
}

fn private() -> *mut u8 {
    // SAFETY: a new mapping at an address that the kernel chooses; left for the process' end.
    let map = unsafe {
        let (null, prot) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        rustix::mm::mmap_anonymous(null, LEN, prot, MapFlags::PRIVATE)
    };
    map.unwrap().cast()
}

/// Whether the kernel has these calls, and the sandbox lets them through.
fn can_ask() -> bool {
    let here = 0u8;
    kernel::statuses(&[&raw const here]).is_ok_and(|found| found[0] >= 0)
}

#[test]
fn touched_memory_is_on_a_node_and_untouched_is_nowhere() {
    if !can_ask() {
        eprintln!("skipped: move_pages is not to be had here");
        return;
    }
    let map = private();
    assert!(spread_of(map, LEN as u64, 0, &[]).is_unknown());
    // Asked, and still untouched.
    let pages: Vec<*const u8> = samples(map, LEN as u64, 0);
    assert!(kernel::statuses(&pages).unwrap().iter().all(|status| *status < 0));
    // SAFETY: within the mapping made above, which only this thread uses.
    unsafe { map.write_bytes(1, LEN) };
    let node = spread_of(map, LEN as u64, 0, &[]).most().unwrap();
    assert!(Nodes::of_machine().all.contains(&node));
    if Nodes::of_machine().is_one() {
        assert_eq!(spread_of(map, LEN as u64, 3, &[]), Spread::on(0, LEN as u64));
    }
}

#[test]
fn one_known_page_tells_of_a_range() {
    if !can_ask() {
        return;
    }
    let map = private();
    let ring = map.wrapping_add(12_345);
    // SAFETY: within the mapping made above, which only this thread uses.
    unsafe { ring.write_volatile(1) };
    assert!(spread_of(map, LEN as u64, 0, &[ring]).most().is_some());
}

#[test]
fn shared_memory_tells_what_its_owner_bound_it_to() {
    let theirs = SharedMemory::new("numa", LEN).unwrap();
    let fd = std::os::fd::AsFd::as_fd(&theirs).try_clone_to_owned().unwrap();
    let ours = SharedMemory::from_fd(fd).unwrap();
    let mask = [1u64; 1];
    // SAFETY: the mapping is ours, and the call changes where its pages will come from.
    let bound = unsafe {
        let (mode, bits) = (libc::MPOL_BIND, 64u64);
        libc::syscall(libc::SYS_mbind, theirs.as_ptr(), LEN, mode, mask.as_ptr(), bits, 0)
    };
    if bound != 0 || !can_ask() {
        eprintln!("skipped: mbind is not to be had here");
        return;
    }
    assert_eq!(spread_of(ours.as_ptr(), LEN as u64, 0, &[]), Spread::on(0, LEN as u64));
}

#[test]
fn what_is_not_mapped_is_unknown() {
    let wild = std::ptr::without_provenance(0x10_0000_0000_0000);
    assert!(spread_of(wild, 1 << 40, 7, &[std::ptr::null()]).is_unknown());
}
