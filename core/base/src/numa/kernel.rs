//! The three system calls about NUMA: `move_pages`, `get_mempolicy`, `set_mempolicy`.

use std::io;

use libc::{c_int, c_long, c_ulong, c_void};

/// Number of a NUMA node.
pub type Node = u32;

/// Nodes that Linux can have (`CONFIG_NODES_SHIFT` is 10 at most).
const MAX_NODES: usize = 1024;

/// Linux counts the bits of a mask from one.
const MASK_LEN: c_ulong = MAX_NODES as c_ulong + 1;

/// Flag of `get_mempolicy`: the policy of an address, not of the thread (linux/mempolicy.h).
const MPOL_F_ADDR: c_ulong = 1 << 1;

type Mask = [u64; MAX_NODES / 64];

/// NUMA memory policy of a thread or of a range: a mode and its nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Policy {
    mode: c_int,
    mask: Mask,
}

impl Policy {
    /// Policy that takes pages from `node` while it has free ones, then from others. None: the
    /// number is too high.
    pub(super) fn preferred(node: Node) -> Option<Self> {
        let (word, bit) = (node as usize / 64, node % 64);
        let mut mask = [0; MAX_NODES / 64];
        *mask.get_mut(word)? = 1 << bit;
        Some(Self { mode: libc::MPOL_PREFERRED, mask })
    }

    /// Node of the policy, if it names a single one.
    pub(super) fn only_node(&self) -> Option<Node> {
        let word = self.mask.iter().position(|word| *word != 0)?;
        let bits: u32 = self.mask.iter().map(|word| word.count_ones()).sum();
        (bits == 1).then(|| word as Node * 64 + self.mask[word].trailing_zeros())
    }

    /// Policy of the calling thread.
    pub(super) fn of_thread() -> Option<Self> {
        get(std::ptr::null(), 0)
    }

    /// Makes this the policy of the calling thread.
    pub(super) fn apply(&self) -> io::Result<()> {
        let mode = c_long::from(self.mode);
        // SAFETY: the mask is MAX_NODES bits long, and only read; the call changes where the
        // kernel takes new pages from, and no memory.
        checked(unsafe {
            libc::syscall(libc::SYS_set_mempolicy, mode, self.mask.as_ptr(), MASK_LEN)
        })
    }
}

/// Policy of the range with `address`: set by us, or, for shared memory, by any other process.
pub(super) fn policy_of(address: *const u8) -> Option<Policy> {
    get(address, MPOL_F_ADDR)
}

fn get(address: *const u8, flags: c_ulong) -> Option<Policy> {
    let mut policy = Policy { mode: 0, mask: [0; MAX_NODES / 64] };
    let mask = policy.mask.as_mut_ptr();
    // SAFETY: mode and mask (of MAX_NODES bits) are ours and written within the call; the address
    // is only looked up, not accessed: one that is not mapped is an error.
    let got = checked(unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &mut policy.mode, mask, MASK_LEN, address, flags)
    });
    got.ok().map(|()| policy)
}

/// Node of each page, or a negative error number. Linux looks them up in the page table: no page is
/// brought in.
pub(super) fn statuses(pages: &[*const u8]) -> io::Result<Vec<c_int>> {
    let mut statuses: Vec<c_int> = vec![-libc::ENOENT; pages.len()];
    let nowhere: *const c_int = std::ptr::null();
    let list: *const *const c_void = pages.as_ptr().cast();
    let (own, flags, count) = (0 as c_long, 0 as c_long, pages.len() as c_ulong);
    // SAFETY: both lists have `count` entries, one is read and the other written within the call.
    // Without target nodes the pages are only looked up; an address that is not mapped is an error
    // in its status.
    checked(unsafe {
        let statuses = statuses.as_mut_ptr();
        libc::syscall(libc::SYS_move_pages, own, count, list, nowhere, statuses, flags)
    })?;
    Ok(statuses)
}

fn checked(result: c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
