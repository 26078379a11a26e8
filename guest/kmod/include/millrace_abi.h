/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * Layout of the memory in which members of a channel and their host read each other's messages.
 *
 * Two kinds of memory:
 *
 * - The *mailbox*, BAR 2 of the ivshmem-doorbell device. One file per member: the host and this
 *   member alone have it. The host writes the first half, the member the second.
 * - The member's own memory. Peers of its trust domain have it as a read-only BAR (ivshmem-plain),
 *   so all messages of a member lie in its own memory, and their receivers only read them. An
 *   offset (`*_off`) is one into the member's memory file, not a guest-physical address; the
 *   mailbox says how the two map.
 *
 * All numbers are little-endian. A reader copies a structure once, checks the copy and uses the
 * copy. The Rust side of this file is core/guest-abi/src/channel.rs; a test compares the two.
 */
#ifndef MILLRACE_ABI_H
#define MILLRACE_ABI_H

#include <linux/types.h>

#define MR_VERSION 5

/* "MRHOST\0\0", "MRGUEST\0", "MRDIR\0\0\0", "MRLINK\0\0" as little-endian numbers. */
#define MR_HOST_MAGIC 0x000054534f48524dULL
#define MR_GUEST_MAGIC 0x005453455547524dULL
#define MR_DIR_MAGIC 0x000000524944524dULL
#define MR_LINK_MAGIC 0x00004b4e494c524dULL

/* ---- mailbox ------------------------------------------------------------------------------- */

#define MR_MAILBOX_LEN 65536
#define MR_GUEST_OFF 32768 /* where the member's half begins */
#define MR_TABLE_OFF 4096 /* the member table, in the host's half */
#define MR_EXCLUDE_OFF 24576 /* flows that may not be taken, in the host's half */

#define MR_MAX_MEMBERS 32 /* of one trust domain: a member maps all others */
#define MR_MAX_MACS 8
#define MR_MAX_ADDRESSES 16
#define MR_MAX_REGIONS 8
#define MR_MAX_EXCLUDES 128
#define MR_MAX_VECTORS 9 /* 0: control; 1 to 8: one for each receive queue */
#define MR_NAME_LEN 64

/* A range of guest-physical memory and where it is in the member's memory file. */
struct mr_region {
	__le64 gpa;
	__le64 len;
	__le64 off;
};

/* At offset 0 of the mailbox. Written by the host. */
struct mr_host {
	__le64 magic; /* MR_HOST_MAGIC, written last */
	__le32 version;
	__le32 member_id; /* this member's number at the doorbell server */
	__le32 host_id; /* ring this number to call the host */
	__le32 vectors; /* doorbells of every member, 2 to MR_MAX_VECTORS */
	__le32 heartbeat_ms; /* how often heartbeats are counted up */
	__le32 dead_after_ms; /* a heartbeat that stands still for so long means death */
	__le64 heartbeat; /* the host's */
	__le32 table_seq; /* odd while table, regions or excludes are being written */
	__le32 regions_len; /* used entries of regions */
	__le64 window_len; /* bytes of this member's memory file that peers see, from 0 */
	struct mr_region regions[MR_MAX_REGIONS];
	__le32 excludes_len; /* used entries at MR_EXCLUDE_OFF */
	__le32 excludes_seq; /* counted up with every change; the member answers with it */
	__u8 domain[MR_NAME_LEN]; /* trust domain, for people; zero-terminated */
	/* What this member may send in a second, to all peers together; 0: no ceiling. */
	__le64 ceiling_bytes_per_s; /* a message counts MR_MIN_CHARGE_LEN at least */
	__le64 ceiling_ops_per_s; /* messages */
	__le32 ceiling_burst_ms; /* so much of both may be used at once after a pause */
	__le32 reserved;
};

enum mr_member_state {
	MR_MEMBER_NONE = 0, /* entry not used */
	MR_MEMBER_JOINED = 1, /* has a doorbell; its module has not spoken yet */
	MR_MEMBER_ACTIVE = 2, /* generation and dir_off are valid: links may be made */
	MR_MEMBER_LEAVING = 3, /* send no more, give its pages back */
	MR_MEMBER_DEAD = 4, /* its VM is gone: it reads nothing any more */
};

/* An entry of the member table: MR_MAX_MEMBERS of them at MR_TABLE_OFF, this member's included. */
struct mr_member {
	__le32 id;
	__le32 state; /* enum mr_member_state */
	__le64 generation; /* the member's own number for this load of its module */
	__le64 dir_off; /* its directory page */
	__le64 window_len; /* bytes of its memory that can be seen */
	__le32 slot; /* physical slot that its memory is plugged into here; 0: none */
	__le32 macs_len;
	__le32 addresses_len;
	__le32 reserved0;
	__u8 name[MR_NAME_LEN]; /* VM, for people; zero-terminated */
	__u8 macs[MR_MAX_MACS][8]; /* six bytes each, two of padding */
	__u8 addresses[MR_MAX_ADDRESSES][16]; /* IPv6, or IPv4 as ::ffff:a.b.c.d */
	__u8 reserved[80];
};

/* A flow that has to take the ordinary way, from this member's view. Ports in host order. */
struct mr_exclude {
	__u8 local[16];
	__u8 remote[16];
	__le16 local_port;
	__le16 remote_port;
	__le32 protocol; /* IPPROTO_TCP */
};

enum mr_guest_state {
	MR_GUEST_NONE = 0,
	MR_GUEST_ACTIVE = 1,
	MR_GUEST_LEAVING = 2, /* draining, by itself or because it was told to */
	MR_GUEST_LEFT = 3, /* nothing of it is used any more, and it uses nothing */
};

enum mr_link_state {
	MR_LINK_NONE = 0,
	MR_LINK_OPENING = 1, /* offered; the peer's offer is awaited */
	MR_LINK_UP = 2,
	MR_LINK_DRAINING = 3, /* sends no more; waits for pages lent and borrowed */
	MR_LINK_CLOSED = 4, /* nothing is lent or borrowed: the peer's memory can be unplugged */
};

/* State and counters of a member's link to one peer. */
struct mr_link_status {
	__le32 peer_id;
	__le32 state; /* enum mr_link_state */
	__le32 borrowed; /* pages of the peer that are in use here */
	__le32 lent; /* messages of this member that the peer still refers to */
	__le64 sent; /* messages */
	__le64 received;
	__le64 sent_bytes;
	__le64 referred_bytes; /* part of sent_bytes that was passed by reference */
	__le64 refused; /* messages of the peer that were wrong */
	__le64 received_bytes;
};

/* At MR_GUEST_OFF of the mailbox. Written by the member; the host believes nothing of it. */
struct mr_guest {
	__le64 magic; /* MR_GUEST_MAGIC, written last */
	__le32 version;
	__le32 state; /* enum mr_guest_state */
	__le64 generation;
	__le64 dir_off;
	__le64 heartbeat;
	__le32 excludes_seq; /* excludes in force: no packet of their flows is taken */
	__le32 reserved;
	struct mr_link_status links[MR_MAX_MEMBERS]; /* by index of the peer in the table */
};

/* ---- a member's own memory ----------------------------------------------------------------- */

#define MR_PAGE_LEN 4096
#define MR_CHUNK_LEN 65536 /* rings, slots and FIFOs are made of such pieces */
#define MR_MAX_QUEUES 8 /* rings of a link, in one direction */
#define MR_RING_LEN 1024 /* entries of a ring: one chunk */
#define MR_SLOTS 128 /* messages by reference on their way, per ring: one chunk */
#define MR_DONE_LEN 256 /* entries of the ring of released slots; above MR_SLOTS */
#define MR_MAX_FIFO_CHUNKS 32 /* 2 MiB per ring */
#define MR_META_LEN 32
#define MR_MAX_HEAD_LEN 192 /* bytes that a slot carries itself: headers */
#define MR_MAX_SEGS 18 /* pieces of pages of a message by reference: 64 KiB in pages, unaligned */
#define MR_MAX_MESSAGE_LEN 65920 /* 64 KiB and headers */
#define MR_MIN_CHARGE_LEN 512 /* least bytes that a message counts for a ceiling */

/* An entry of the directory: where the link to one peer is. */
struct mr_dir_entry {
	__le32 peer_id;
	__le32 reserved;
	__le64 peer_generation; /* that the link is meant for */
	__le64 link_off; /* 0: no link */
};

/* The directory page: the root of everything that peers read. */
struct mr_dir {
	__le64 magic;
	__le32 version;
	__le32 member_id;
	__le64 generation;
	__le64 heartbeat; /* counted up every heartbeat_ms */
	struct mr_dir_entry links[MR_MAX_MEMBERS]; /* by index of the peer in the owner's table */
};

/* Where the parts of one ring are. */
struct mr_link_queue {
	__le64 state_off; /* struct mr_queue_state, a page */
	__le64 ring_off; /* MR_RING_LEN of struct mr_entry */
	__le64 slots_off; /* MR_SLOTS of struct mr_slot */
	__le32 fifo_chunks;
	__le32 reserved;
	__le64 fifo_off[MR_MAX_FIFO_CHUNKS];
};

/* The header page of a link from the owner to one peer. */
struct mr_link {
	__le64 magic;
	__le32 version;
	__le32 state; /* enum mr_link_state of the owner */
	__le32 from_id;
	__le32 to_id;
	__le64 from_generation;
	__le64 to_generation;
	__le32 queues; /* 1 to MR_MAX_QUEUES */
	__le32 clients; /* bits of enum mr_client_id: whose messages the owner takes now */
	struct mr_link_queue queue[MR_MAX_QUEUES];
};

/*
 * What the owner says about one pair of rings: its own that it fills, and the peer's of the same
 * number that it empties. Each line is written for another reason, so that readers do not fetch
 * what did not change. Indices run freely; events are as in the virtio specification, 2.7.10:
 * "tell me when you pass this".
 */
struct mr_queue_state {
	/* owner as producer */
	__le32 produced; /* entries of the own ring */
	__u8 pad0[60];
	__le32 taken_event; /* ring when `taken` passes this: the own ring was full */
	__le32 done_event; /* ring when `done` passes this: slots are scarce */
	__u8 pad1[56];
	/* owner as consumer */
	__le32 taken; /* entries of the peer's ring */
	__le32 done; /* entries of done_slots */
	__u8 pad2[56];
	__le32 produced_event; /* ring when the peer's `produced` passes this */
	__le32 want_copies; /* not 0: send no references, the receiver has a backlog */
	__u8 pad3[56];
	__le16 done_slots[MR_DONE_LEN]; /* the peer's slots that were released */
};

enum mr_kind {
	MR_KIND_COPY = 1, /* all bytes are in the FIFO */
	MR_KIND_REFERENCE = 2, /* a slot says where they are */
};

enum mr_client_id {
	MR_CLIENT_NET = 1, /* IP packets that were taken at LOCAL_OUT */
	MR_CLIENT_DEVICE = 2, /* Ethernet frames of the channel's own network device */
	MR_CLIENT_BLOCK = 3, /* reserved for block requests */
	MR_MAX_CLIENT = 15,
};

/* An entry of a ring. */
struct mr_entry {
	__u8 kind; /* enum mr_kind */
	__u8 client; /* enum mr_client_id */
	__le16 slot; /* by reference: which */
	__le32 len; /* bytes of the message without meta */
	__le32 fifo_pos; /* by copy: where it begins; a position runs freely */
	__le32 fifo_end; /* the FIFO's position after this entry, of either kind */
	__u8 meta[MR_META_LEN]; /* the client's */
	__u8 reserved[16];
};

/* Bytes of the owner's memory. Never across the end of a page. */
struct mr_seg {
	__le64 off;
	__le32 len;
	__le32 reserved;
};

/* A message by reference: `head_len` bytes of `head`, then the segments. */
struct mr_slot {
	__le32 head_len;
	__le32 segs_len;
	__u8 head[MR_MAX_HEAD_LEN];
	struct mr_seg segs[MR_MAX_SEGS];
	__u8 reserved[24];
};

/* In `flags` of a message between the clients themselves: no bytes, `gso_type` has the type. */
#define MR_NET_CONTROL 0x80
/*
 * Type of an answer: the mark with the token `hash` came by `gso_size` queues more, and so did all
 * earlier packets of these queues.
 */
#define MR_NET_ARRIVED 1
/* Type of a mark, which is to be answered. A frame on the ordinary way is its other form. */
#define MR_NET_MARK 2

/* EtherType of a mark's frame ("local experimental", IEEE 802); struct mr_net_mark follows it. */
#define MR_NET_ETHERTYPE 0x88b5
#define MR_NET_MAGIC 0x4e524d31 /* "1MRN" */

struct mr_net_mark {
	__le32 magic;
	__le32 from_id;
	__le32 to_id;
	__le32 token;
};

/* meta of MR_CLIENT_NET and MR_CLIENT_DEVICE. */
struct mr_net_meta {
	/* struct virtio_net_hdr (virtio 5.1.6); offsets are from the message's first byte */
	__u8 flags;
	__u8 gso_type;
	__le16 hdr_len;
	__le16 gso_size;
	__le16 csum_start;
	__le16 csum_offset;
	__u8 eth[14]; /* Ethernet header: of the route, or of the frame */
	__le32 hash; /* of the flow; 0: none */
	__u8 reserved[4];
};

#endif
