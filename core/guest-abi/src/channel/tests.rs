//! The header for C and this file say the same: a C program prints what the compiler made of it.

// Constants of all integer types become u64 in one macro.
#![allow(clippy::cast_lossless)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;
use crate::channel_net::{self as net, NetMark, NetMeta};

/// An expression of C and its value here.
type Fact = (String, u64);

/// Size and offsets of a structure.
macro_rules! fields {
    ($facts:ident, $c:ident, $rust:ident: $($field:ident),*) => {
        $facts.push((format!("sizeof(struct {})", stringify!($c)), size_of::<$rust>() as u64));
        $($facts.push((
            format!("offsetof(struct {}, {})", stringify!($c), stringify!($field)),
            offset_of!($rust, $field) as u64,
        ));)*
    };
}

/// Constants: a name of C and the value here.
macro_rules! constants {
    ($($c:ident: $rust:expr),* $(,)?) => {
        vec![$((stringify!($c).to_owned(), $rust as u64)),*]
    };
}

fn structures() -> Vec<Fact> {
    let mut facts = Vec::new();
    fields!(facts, mr_region, Region: gpa, len, off);
    fields!(facts, mr_host, Host: magic, version, member_id, host_id, vectors, heartbeat_ms,
        dead_after_ms, heartbeat, table_seq, regions_len, window_len, regions, excludes_len,
        excludes_seq, domain, ceiling_bytes_per_s, ceiling_ops_per_s, ceiling_burst_ms, reserved);
    fields!(facts, mr_member, Member: id, state, generation, dir_off, window_len, slot, macs_len,
        addresses_len, reserved0, name, macs, addresses, reserved);
    fields!(facts, mr_exclude, Exclude: local, remote, local_port, remote_port, protocol);
    fields!(facts, mr_link_status, LinkStatus: peer_id, state, borrowed, lent, sent, received,
        sent_bytes, referred_bytes, refused, received_bytes);
    fields!(facts, mr_guest, Guest: magic, version, state, generation, dir_off, heartbeat,
        excludes_seq, reserved, links);
    fields!(facts, mr_dir_entry, DirEntry: peer_id, reserved, peer_generation, link_off);
    fields!(facts, mr_dir, Dir: magic, version, member_id, generation, heartbeat, links);
    fields!(facts, mr_link_queue, LinkQueue: state_off, ring_off, slots_off, fifo_chunks, reserved,
        fifo_off);
    fields!(facts, mr_link, Link: magic, version, state, from_id, to_id, from_generation,
        to_generation, queues, clients, queue);
    fields!(facts, mr_queue_state, QueueState: produced, pad0, taken_event, done_event, pad1, taken,
        done, pad2, produced_event, want_copies, pad3, done_slots);
    fields!(facts, mr_entry, Entry: kind, client, slot, len, fifo_pos, fifo_end, meta, reserved);
    fields!(facts, mr_seg, Seg: off, len, reserved);
    fields!(facts, mr_slot, Slot: head_len, segs_len, head, segs, reserved);
    fields!(facts, mr_net_mark, NetMark: magic, from_id, to_id, token);
    fields!(facts, mr_net_meta, NetMeta: flags, gso_type, hdr_len, gso_size, csum_start,
        csum_offset, eth, hash, reserved);
    facts
}

fn constants() -> Vec<Fact> {
    constants!(
        MR_VERSION: VERSION, MR_HOST_MAGIC: HOST_MAGIC, MR_GUEST_MAGIC: GUEST_MAGIC,
        MR_DIR_MAGIC: DIR_MAGIC, MR_LINK_MAGIC: LINK_MAGIC, MR_MAILBOX_LEN: MAILBOX_LEN,
        MR_GUEST_OFF: GUEST_OFF, MR_TABLE_OFF: TABLE_OFF, MR_EXCLUDE_OFF: EXCLUDE_OFF,
        MR_MAX_MEMBERS: MAX_MEMBERS, MR_MAX_MACS: MAX_MACS, MR_MAX_ADDRESSES: MAX_ADDRESSES,
        MR_MAX_REGIONS: MAX_REGIONS, MR_MAX_EXCLUDES: MAX_EXCLUDES, MR_MAX_VECTORS: MAX_VECTORS,
        MR_NAME_LEN: NAME_LEN, MR_PAGE_LEN: PAGE_LEN, MR_CHUNK_LEN: CHUNK_LEN,
        MR_MAX_QUEUES: MAX_QUEUES, MR_RING_LEN: RING_LEN, MR_SLOTS: SLOTS, MR_DONE_LEN: DONE_LEN,
        MR_MAX_FIFO_CHUNKS: MAX_FIFO_CHUNKS, MR_META_LEN: META_LEN, MR_MAX_HEAD_LEN: MAX_HEAD_LEN,
        MR_MAX_SEGS: MAX_SEGS, MR_MAX_MESSAGE_LEN: MAX_MESSAGE_LEN,
        MR_MIN_CHARGE_LEN: MIN_CHARGE_LEN,
        MR_MEMBER_NONE: member_state::NONE, MR_MEMBER_JOINED: member_state::JOINED,
        MR_MEMBER_ACTIVE: member_state::ACTIVE, MR_MEMBER_LEAVING: member_state::LEAVING,
        MR_MEMBER_DEAD: member_state::DEAD, MR_GUEST_NONE: guest_state::NONE,
        MR_GUEST_ACTIVE: guest_state::ACTIVE, MR_GUEST_LEAVING: guest_state::LEAVING,
        MR_GUEST_LEFT: guest_state::LEFT, MR_LINK_NONE: link_state::NONE,
        MR_LINK_OPENING: link_state::OPENING, MR_LINK_UP: link_state::UP,
        MR_LINK_DRAINING: link_state::DRAINING, MR_LINK_CLOSED: link_state::CLOSED,
        MR_KIND_COPY: kind::COPY, MR_KIND_REFERENCE: kind::REFERENCE, MR_CLIENT_NET: client::NET,
        MR_CLIENT_DEVICE: client::DEVICE, MR_CLIENT_BLOCK: client::BLOCK,
        MR_MAX_CLIENT: client::MAX, MR_NET_CONTROL: net::CONTROL, MR_NET_ARRIVED: net::ARRIVED,
        MR_NET_MARK: net::MARK, MR_NET_ETHERTYPE: net::ETHERTYPE, MR_NET_MAGIC: net::MARK_MAGIC,
    )
}

fn include_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/kmod/include")
}

/// Values of the expressions by C's compiler.
fn in_c(facts: &[Fact]) -> BTreeMap<String, u64> {
    let folder = std::env::temp_dir().join(format!("millrace-channel-abi-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut source = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include \"millrace_abi.h\"\nint main(void)\n{\n",
    );
    for (name, _) in facts {
        writeln!(source, "printf(\"%s=%llu\\n\", \"{name}\", (unsigned long long)({name}));")
            .unwrap();
    }
    source.push_str("return 0;\n}\n");
    let (file, program) = (folder.join("abi.c"), folder.join("abi"));
    std::fs::write(&file, source).unwrap();
    let built = Command::new("cc")
        .args(["-Wall", "-Werror", "-I"])
        .arg(include_folder())
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let said = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let pair = |line: &str| {
        let (name, value) = line.split_once('=').unwrap();
        (name.to_owned(), value.parse().unwrap())
    };
    String::from_utf8(said.stdout).unwrap().lines().map(pair).collect()
}

#[test]
fn sizes_offsets_and_constants_are_those_of_the_header() {
    let facts: Vec<Fact> = structures().into_iter().chain(constants()).collect();
    let said = in_c(&facts);
    assert_eq!(said.len(), facts.len());
    for (name, here) in facts {
        assert_eq!(said[&name], here, "{name}");
    }
}

#[test]
fn no_constant_and_no_structure_of_the_header_is_missing() {
    let header = std::fs::read_to_string(include_folder().join("millrace_abi.h")).unwrap();
    let known: Vec<String> = constants().into_iter().map(|(name, _)| name).collect();
    let sizes: Vec<String> = structures().into_iter().map(|(name, _)| name).collect();
    for line in header.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["#define", name, _, ..] | [name, "=", ..] if name.starts_with("MR_") => {
                assert!(known.iter().any(|other| other == name), "{name}");
            }
            ["struct", name, "{"] => {
                assert!(sizes.contains(&format!("sizeof(struct {name})")), "{name}");
            }
            _ => {}
        }
    }
}

#[test]
fn the_parts_of_a_mailbox_do_not_overlap() {
    assert!(size_of::<Host>() <= TABLE_OFF);
    assert!(TABLE_OFF + MAX_MEMBERS * size_of::<Member>() <= EXCLUDE_OFF);
    assert!(EXCLUDE_OFF + MAX_EXCLUDES * size_of::<Exclude>() <= GUEST_OFF);
    assert!(GUEST_OFF + size_of::<Guest>() <= MAILBOX_LEN);
    // The host writes and the member reads words of eight bytes.
    assert_eq!(offset_of!(Host, heartbeat) % 8, 0);
    assert_eq!(offset_of!(Host, table_seq) % 8, 0);
}

#[test]
fn rings_and_slots_fill_a_chunk_and_headers_fit_a_page() {
    assert_eq!(RING_LEN * size_of::<Entry>(), CHUNK_LEN);
    assert_eq!(SLOTS * size_of::<Slot>(), CHUNK_LEN);
    assert_eq!(size_of::<NetMeta>(), META_LEN);
    for len in [size_of::<Dir>(), size_of::<Link>(), size_of::<QueueState>()] {
        assert!(len as u64 <= PAGE_LEN, "{len}");
    }
}
