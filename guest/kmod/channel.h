/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Declarations that the files of millrace_channel share. Theory of operation: channel_main.c.
 */
#ifndef MILLRACE_CHANNEL_INTERNAL_H
#define MILLRACE_CHANNEL_INTERNAL_H

#include <linux/completion.h>
#include <linux/hrtimer.h>
#include <linux/kref.h>
#include <linux/memremap.h>
#include <linux/mutex.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <linux/rcupdate.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "include/millrace_channel.h"

#define MR_CHUNK_ORDER 4 /* MR_CHUNK_LEN in pages */
/* Pages of a peer that may be in use here before it is asked to send copies: 16 MiB. */
#define MR_MAX_BORROWED 4096

struct mr_channel;

/* One use of a page of the peer's memory; a page may have several users at once. */
struct mr_use {
	struct mr_use *next;
	struct mr_queue *queue;
	u16 slot;
};

/* Slot of the peer with pages in use here. */
struct mr_borrow {
	u32 pending; /* uses, and one while the message is being received */
	struct mr_use uses[MR_MAX_SEGS];
};

/* Own slot that the peer refers to. */
struct mr_lent {
	u32 pages_len; /* 0: the slot is free */
	struct page *pages[MR_MAX_SEGS];
};

struct mr_queue_stats {
	u64 sent, sent_bytes, referred, referred_bytes, full, held, kicks;
	u64 received, received_bytes, borrowed, busy_pages, no_client;
};

/* One pair of rings: an own one and the peer's. */
struct mr_queue {
	struct mr_peer *peer;
	unsigned int index;

	/* Producer; lock: every sender, and every context that takes slots back. */
	spinlock_t lock ____cacheline_aligned_in_smp;
	struct mr_queue_state *own_state; /* a page that the peer reads */
	struct mr_entry *ring;
	struct mr_slot *slots;
	void *fifo[MR_MAX_FIFO_CHUNKS];
	u32 fifo_chunks;
	u32 produced, taken_seen, done_seen, fifo_head, fifo_tail;
	u32 free_len;
	u16 free_slots[MR_SLOTS];
	u32 waiting_clients; /* clients whose message found the ring full, by bit */
	u32 held_clients; /* clients whose message was above a ceiling, by bit */
	struct mr_lent *lent;

	/* Consumer; one NAPI context, but for `done`, which has the peer's borrow_lock. */
	const struct mr_queue_state *peer_state ____cacheline_aligned_in_smp;
	const struct mr_entry *peer_ring;
	const struct mr_slot *peer_slots;
	const u8 *peer_fifo[MR_MAX_FIFO_CHUNKS];
	u32 peer_fifo_len; /* bytes, a power of two */
	u32 taken, done;
	struct mr_borrow *borrows;
	struct mr_queue_stats stats;
};

/* Memory of a peer, as it is plugged in here. */
struct mr_memory {
	struct list_head list;
	struct pci_dev *pdev;
	u32 slot;
	bool mapped;
	struct dev_pagemap pgmap;
	void *base;
	u64 len;
	struct mr_peer *peer;
};

struct mr_peer {
	struct kref ref;
	struct rcu_head rcu;
	struct mr_channel *ch;
	u32 id, index;
	u64 generation;
	char name[MR_NAME_LEN];
	u32 state; /* enum mr_link_state: our side */
	bool attached; /* the peer's rings were checked and may be read */
	bool open; /* messages can be sent */
	bool broken; /* it broke the protocol; until its generation changes */
	bool dead; /* it no longer reads */
	u32 up_clients; /* clients whose last call was ->peer_up(), by bit */
	u64 heartbeat; /* last value seen in dir, and when it changed */
	unsigned long heartbeat_jiffies;
	struct mr_memory *memory;
	const struct mr_dir *dir;
	const struct mr_link *peer_link;
	u64 window_len;
	struct mr_link *own_link; /* a page that the peer reads */
	u32 queues;
	struct mr_queue *queue;
	spinlock_t borrow_lock; /* interrupts off: pages are dropped in any context */
	long borrowed; /* pages of the peer in use here, once for each use */
	atomic64_t refused;
};

/* Receive queue: one vector, one NAPI, the ring of that number of every peer. */
struct mr_vector {
	struct mr_channel *ch;
	unsigned int index;
	struct napi_struct napi;
	unsigned int first_peer; /* index of the peer with the first turn */
	u64 interrupts, polls;
	/* Polling; see channel_poll.c. */
	struct task_struct *poller;
	bool is_watching; /* the thread watches the rings now */
	bool poll_wanted;
	bool paused; /* messages wait until the CPU is idle, or resume_timer fires */
	struct hrtimer resume_timer;
	u64 window_ns, last_message_ns;
	u64 poll_hits, poll_misses, polled_ns;
};

/* Retries of a member that cannot be linked, or breaks its links: less and less often. */
struct mr_retry {
	u8 failures;
	u8 beats; /* heartbeats until the next attempt */
};

/* One ceiling; see channel_ceiling.c. */
struct mr_bucket {
	u64 rate; /* 0: no ceiling */
	u64 free_ns; /* when a message may be sent */
	u64 rest; /* of the last division, in nanoseconds times the rate */
};

struct mr_ceiling {
	bool is_set; /* whether there is any ceiling; read without the lock */
	spinlock_t lock; /* inside the queues' locks */
	struct mr_bucket bytes, ops;
	u64 burst_ns;
	bool is_waiting; /* queues wait, or may; the timer is queued, or runs */
	const struct mr_queue *turn; /* the one that may send meanwhile; compared only */
	u32 turn_at, turn_left; /* its number, and the bytes left to it */
	struct hrtimer timer;
};

struct mr_channel {
	struct pci_dev *pdev;
	void __iomem *regs;
	u8 *mailbox;
	u32 id, host_id, vectors, queues;
	u32 heartbeat_ms, dead_after_ms;
	u64 measure_start_ns, doorbell_ns; /* see channel_poll.c */
	u64 generation, window_len;
	u32 regions_len;
	struct mr_region regions[MR_MAX_REGIONS]; /* in CPU order */
	bool leaving; /* the host wants it, or the kernel module is unloaded */
	bool stopping; /* the kernel module is unloaded */
	u32 excludes_len, excludes_seq, held_excludes_seq;
	struct mr_ceiling ceiling;
	struct mr_dir *dir;
	u32 own_index;
	struct net_device *napi_dev;
	struct mr_vector *vector;
	struct workqueue_struct *work;
	struct work_struct control;
	struct delayed_work beat;
	struct mr_peer __rcu *peers[MR_MAX_MEMBERS];
	struct mr_retry retry[MR_MAX_MEMBERS];
	u64 broken_generations[MR_MAX_MEMBERS]; /* generations that broke the protocol */
	struct mr_member table[MR_MAX_MEMBERS]; /* last copy, under mr_lock */
	struct mr_exclude excludes[MR_MAX_EXCLUDES]; /* last copy, under mr_lock */
	u8 host_half[MR_GUEST_OFF] __aligned(8); /* copy of the host's half */
};

extern struct mutex mr_lock; /* held by all control paths */
extern struct mr_channel *mr_channel; /* under mr_lock; one per guest */
extern struct list_head mr_memories; /* under mr_lock */
extern unsigned int mr_fifo_kb;

/* channel_mailbox.c */
int mr_mailbox_open(struct mr_channel *ch);
bool mr_mailbox_read_table(struct mr_channel *ch);
void mr_mailbox_report(struct mr_channel *ch, u32 state);
void mr_mailbox_ring_host(struct mr_channel *ch);

/* channel_memory.c */
int mr_own_offset(const struct mr_channel *ch, phys_addr_t gpa, u64 len, u64 *off);
void *mr_alloc_shared(const struct mr_channel *ch, unsigned int order, u64 *off);
int mr_memory_map(struct mr_memory *memory, struct mr_peer *peer);
void mr_memory_unmap(struct mr_memory *memory);
const void *mr_peer_address(const struct mr_peer *peer, u64 off, u64 len, u64 align);
bool mr_borrow_pages(struct mr_queue *q, u16 slot, struct page **pages, unsigned int count);
bool mr_borrow_begin(struct mr_queue *q, u16 slot);
void mr_borrow_end(struct mr_queue *q, u16 slot);
void mr_pages_flush(struct mr_channel *ch);
bool mr_is_peer_page(const struct page *page);
bool mr_peer_pages_are_in_use(void);

/* channel_pages.c */
int mr_pages_register(void);
void mr_pages_unregister(void);

/* channel_link.c */
void mr_links_update(struct mr_channel *ch);
void mr_links_beat(struct mr_channel *ch);
bool mr_links_are_closed(struct mr_channel *ch);
void mr_peer_break(struct mr_peer *peer, const char *reason, u64 value);
void mr_links_publish_clients(struct mr_channel *ch);
bool mr_links_are_drained(struct mr_channel *ch);

/* channel_queue.c */
int mr_queues_alloc(struct mr_peer *peer);
void mr_queues_free(struct mr_peer *peer);
int mr_queues_attach(struct mr_peer *peer, const struct mr_link *link);
bool mr_queues_are_drained(const struct mr_peer *peer);
u32 mr_queues_reclaim(struct mr_peer *peer);
void mr_queues_wait_for_senders(struct mr_peer *peer);

/* channel_tx.c */
void mr_queue_reclaim(struct mr_queue *q);
bool mr_queue_request_doorbell(struct mr_queue *q);
void mr_queue_release_all(struct mr_queue *q);
u32 mr_queue_count_lent(struct mr_queue *q);

/* channel_ceiling.c */
void mr_ceiling_init(struct mr_channel *ch);
void mr_ceiling_exit(struct mr_channel *ch);
void mr_ceiling_set(struct mr_channel *ch, const struct mr_host *h);
bool mr_ceiling_may_send(struct mr_queue *q, const struct mr_tx *tx);
void mr_ceiling_charge(struct mr_queue *q, u32 len);

/* channel_rx.c */
int mr_vectors_start(struct mr_channel *ch);
void mr_vectors_stop(struct mr_channel *ch);
void mr_vector_kick(struct mr_vector *v);
void mr_vectors_kick(struct mr_channel *ch);
bool mr_vector_rearm(struct mr_vector *v);
void mr_vector_disarm(struct mr_vector *v);
bool mr_vector_has_entries(struct mr_vector *v);

/* channel_poll.c */
void mr_poll_measure(struct mr_channel *ch);
void mr_poll_handle_doorbell(struct mr_channel *ch);
bool mr_poll_continue(struct mr_vector *v);
bool mr_poll_pause(struct mr_vector *v);
void mr_poll_start(struct mr_vector *v);
void mr_poll_stop(struct mr_vector *v);

/* channel_client.c */
void mr_client_receive(struct mr_rx *rx);
void mr_clients_received(unsigned int queue);
void mr_clients_writable(struct mr_peer *peer, unsigned int queue, u32 waiting);
u32 mr_clients_mask(void);
u32 mr_clients_update_peer(struct mr_peer *peer, u32 mask);
void mr_clients_table_changed(void);

/* channel_debugfs.c */
void mr_debugfs_init(void);
void mr_debugfs_exit(void);

/* Whether a free-running index passed `event` on its way from `old` to `new`. */
static inline bool mr_has_passed(u32 event, u32 new, u32 old)
{
	return (u32)(new - event - 1) < (u32)(new - old);
}

/*
 * Numbers in shared memory that order other accesses. Publishing a number first makes all earlier
 * writes visible; its observer sees all of them. virt_*(), since the other side may be another CPU
 * even where this guest has only one.
 */
static inline void mr_publish32(__le32 *to, u32 value)
{
	/* Pairs with mr_observe32() in the reader. */
	virt_store_release(to, cpu_to_le32(value));
}

static inline void mr_publish64(__le64 *to, u64 value)
{
	/* Pairs with mr_observe64() in the reader. */
	virt_store_release(to, cpu_to_le64(value));
}

static inline u32 mr_observe32(const __le32 *from)
{
	/* Pairs with mr_publish32() in the writer. */
	return le32_to_cpu(virt_load_acquire(from));
}

static inline u64 mr_observe64(const __le64 *from)
{
	/* Pairs with mr_publish64() in the writer. */
	return le64_to_cpu(virt_load_acquire(from));
}

/* Numbers in shared memory that order no other access. */
static inline u32 mr_read32(const __le32 *from)
{
	return le32_to_cpu(READ_ONCE(*from));
}

static inline u64 mr_read64(const __le64 *from)
{
	return le64_to_cpu(READ_ONCE(*from));
}

/* Rings a doorbell: writes peer and vector to the doorbell register of ivshmem. */
static inline void mr_ring(const struct mr_channel *ch, u32 id, u32 vector)
{
	writel(id << 16 | vector, ch->regs + 12);
}

/* Message that is being received. */
struct mr_rx {
	struct mr_queue *queue;
	struct napi_struct *napi;
	struct mr_entry entry; /* a copy */
	u32 len;
	u32 head_len;
	u32 segs_len;
	bool borrowed;
	bool paused; /* no more messages in this round */
	u16 slot;
	u8 head[MR_MAX_HEAD_LEN];
	struct {
		u64 off;
		u32 len;
	} segs[MR_MAX_SEGS]; /* checked */
};

#endif
