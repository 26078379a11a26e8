/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Messages between guests of one host: the interface of millrace_channel for other kernel code.
 *
 * A *peer* is another guest of the same trust domain. A *client* is code that exchanges messages
 * with the clients of the same number on peers. A message is 32 bytes of *meta*, a *head* and a
 * scatter list; the receiver gets the bytes either copied or, above a threshold and where the
 * pages allow it, as pages of the sender's memory, mapped read-only.
 *
 * Life of a message by reference: mr_send() takes a reference on each page, so the client may
 * drop its own at once. The receiver's client takes pages with mr_rx_borrow() and drops each with
 * put_page() when it likes; with the last one the sender's pages are released. A receiver that
 * keeps too many makes its peer copy (see want_copies in millrace_abi.h).
 *
 * Order: messages on one queue to one peer arrive in the order of mr_send(). Nothing is lost
 * while the link is up: a full ring, and a ceiling that is reached, is -ENOSPC, and ->writable()
 * tells when to try again.
 */
#ifndef MILLRACE_CHANNEL_H
#define MILLRACE_CHANNEL_H

#include <linux/mm_types.h>
#include <linux/netdevice.h>
#include <linux/types.h>

#include "millrace_abi.h"

struct mr_peer;
struct sk_buff;
struct mr_rx;

/* Bytes of one or more physically contiguous pages. */
struct mr_sg {
	struct page *page;
	u32 off;
	u32 len;
};

/* Message to be sent: @head_len bytes at @head, then the pieces of @sg. */
struct mr_tx {
	u8 client;
	bool may_refer; /* the pages' content will not change until they are freed */
	const void *meta; /* MR_META_LEN bytes */
	const void *head;
	u32 head_len;
	u32 sg_len;
	const struct mr_sg *sg;
	u32 len; /* of head and sg together, at most MR_MAX_MESSAGE_LEN */
};

/**
 * struct mr_client - code that exchanges messages
 * @id: which client of a peer gets our messages, see enum mr_client_id
 * @name: for listings
 * @owner: module of the functions
 * @peer_up: messages can be sent to the peer. May sleep.
 * @peer_down: the peer takes no more messages; mr_send() says -ENOTCONN. May sleep.
 * @receive: a message came. Softirq; @rx is valid until the function returns.
 * @received: the last ->receive() of a batch is over. Softirq.
 * @writable: a ring that was full has room, or a ceiling lets its queue send. Softirq. Several
 *   CPUs may call it at once.
 * @table_changed: members, their addresses or the excluded flows changed. May sleep.
 */
struct mr_client {
	u8 id;
	const char *name;
	struct module *owner;
	void (*peer_up)(struct mr_peer *peer);
	void (*peer_down)(struct mr_peer *peer);
	void (*receive)(struct mr_rx *rx);
	void (*received)(unsigned int queue);
	void (*writable)(struct mr_peer *peer, unsigned int queue);
	void (*table_changed)(void);
};

/* Member as the host describes it, addresses in the form of millrace_abi.h. */
struct mr_member_info {
	u32 id;
	u32 index; /* in the table: below MR_MAX_MEMBERS */
	bool self;
	u32 macs_len;
	u32 addresses_len;
	u8 macs[MR_MAX_MACS][ETH_ALEN];
	struct in6_addr addresses[MR_MAX_ADDRESSES];
};

/* Registers a client. -EBUSY: the number is taken. Calls ->peer_up() for peers that are up. */
int mr_client_register(const struct mr_client *client);
/* Unregisters a client. Returns when none of its functions runs any more. */
void mr_client_unregister(const struct mr_client *client);

/*
 * Sends a message; the bytes may be reused and the caller's page references dropped afterwards.
 * Any context but hard interrupts. Returns 0, -ENOSPC (ring full or ceiling reached, ->writable()
 * will be called), -ENOTCONN (no link), -EMSGSIZE.
 */
int mr_send(struct mr_peer *peer, unsigned int queue, const struct mr_tx *tx);
/* Whether the peer has taken all messages that were sent to it. */
bool mr_peer_is_idle(struct mr_peer *peer);
/* Number of queues to a peer that this guest uses: one per CPU, within the domain's number. */
unsigned int mr_peer_queues(const struct mr_peer *peer);
/* Index of the peer in the member table. */
u32 mr_peer_index(const struct mr_peer *peer);
/* Holds a peer while a client keeps a pointer after ->peer_down(). */
void mr_peer_get(struct mr_peer *peer);
void mr_peer_put(struct mr_peer *peer);

struct mr_peer *mr_rx_peer(const struct mr_rx *rx);
unsigned int mr_rx_queue(const struct mr_rx *rx);
struct napi_struct *mr_rx_napi(const struct mr_rx *rx);
const void *mr_rx_meta(const struct mr_rx *rx);
/*
 * Makes this message the last of the round, so that programs run before the next one: the received
 * data should be read before more is taken.
 */
void mr_rx_pause(struct mr_rx *rx);
/* Length of the message in bytes. */
u32 mr_rx_len(const struct mr_rx *rx);
/* Length of the bytes before the pages; of the whole message where it was copied. */
u32 mr_rx_head_len(const struct mr_rx *rx);
/* Number of pieces that mr_rx_borrow() would give. */
u32 mr_rx_segs(const struct mr_rx *rx);
/* Copies bytes of the message, which is valid while ->receive() runs. */
void mr_rx_copy(const struct mr_rx *rx, u32 off, void *to, u32 len);
/*
 * Takes all pages of the message, in order: the bytes behind the first mr_rx_head_len(). Returns
 * the number of pieces, each of one page; the caller drops each page with put_page(). 0: there are
 * none, or one is just being released; use mr_rx_copy(). One call per message. The pages lie behind
 * a bus, and some devices cannot read them: see mr_own_pages().
 */
unsigned int mr_rx_borrow(struct mr_rx *rx, struct mr_sg sg[MR_MAX_SEGS]);

/*
 * Replaces peers' pages in a packet by copies, before it goes to a device or to code that writes to
 * it. Packets that leave by IP need no such call. Not 0: no memory.
 */
int mr_own_pages(struct sk_buff *skb);

/* Copies the member table; returns the number of entries filled. May sleep. */
unsigned int mr_members(struct mr_member_info members[MR_MAX_MEMBERS]);
/* Copies the excluded flows; returns their number and *seq, which mr_excludes_hold() answers. */
unsigned int mr_excludes(struct mr_exclude excludes[MR_MAX_EXCLUDES], u32 *seq);
/* Tells the host that packets of the flows of mr_excludes() are no longer taken. */
void mr_excludes_hold(u32 seq);

#endif
