// SPDX-License-Identifier: GPL-2.0
/*
 * Clients: the receivers of messages.
 */
#include <linux/module.h>

#include "channel.h"

/* Time limit for messages that peers sent before they saw that a client is unregistered. */
#define DRAIN_TIMEOUT_MS 5000

static const struct mr_client __rcu *clients[MR_MAX_CLIENT + 1];
static u32 client_mask; /* bits of clients that take messages */

/* Caller holds the lock. */
static const struct mr_client *client_at(unsigned int id)
{
	return rcu_dereference_protected(clients[id], lockdep_is_held(&mr_lock));
}

u32 mr_clients_mask(void)
{
	return client_mask;
}

static void set_client_mask(u32 mask)
{
	client_mask = mask;
	if (mr_channel)
		mr_links_publish_clients(mr_channel);
}

int mr_client_register(const struct mr_client *client)
{
	int err = 0;

	if (client->id > MR_MAX_CLIENT)
		return -EINVAL;
	mutex_lock(&mr_lock);
	if (client_at(client->id)) {
		err = -EBUSY;
	} else {
		rcu_assign_pointer(clients[client->id], client);
		client->table_changed();
		set_client_mask(client_mask | BIT(client->id));
	}
	mutex_unlock(&mr_lock);
	return err;
}
EXPORT_SYMBOL_GPL(mr_client_register);

/* Waits until all messages are received that peers sent before they saw the new client mask. */
static void drain_messages(void)
{
	unsigned long deadline = jiffies + msecs_to_jiffies(DRAIN_TIMEOUT_MS);
	unsigned int drained_checks = 0;
	bool is_drained;

	/* Twice: a sender may be between its check and its send. */
	while (drained_checks < 2 && time_before(jiffies, deadline)) {
		schedule_timeout_idle(1);
		mutex_lock(&mr_lock);
		is_drained = !mr_channel || mr_links_are_drained(mr_channel);
		mutex_unlock(&mr_lock);
		drained_checks = is_drained ? drained_checks + 1 : 0;
	}
}

void mr_client_unregister(const struct mr_client *client)
{
	mutex_lock(&mr_lock);
	set_client_mask(client_mask & ~BIT(client->id));
	mutex_unlock(&mr_lock);
	drain_messages();
	mutex_lock(&mr_lock);
	RCU_INIT_POINTER(clients[client->id], NULL);
	/* Clears the client's bit in up_clients: the next client of its number gets ->peer_up(). */
	if (mr_channel)
		mr_links_update(mr_channel);
	mutex_unlock(&mr_lock);
	synchronize_net();
}
EXPORT_SYMBOL_GPL(mr_client_unregister);

/* Softirq, in an RCU read section. */
void mr_client_receive(struct mr_rx *rx)
{
	const struct mr_client *client = rcu_dereference(clients[rx->entry.client]);

	if (client)
		client->receive(rx);
	else
		rx->queue->stats.no_client++;
}

void mr_clients_received(unsigned int queue)
{
	unsigned int i;

	for (i = 0; i <= MR_MAX_CLIENT; i++) {
		const struct mr_client *client = rcu_dereference(clients[i]);

		if (client)
			client->received(queue);
	}
}

void mr_clients_writable(struct mr_peer *peer, unsigned int queue, u32 waiting)
{
	unsigned int i;

	for (i = 0; i <= MR_MAX_CLIENT; i++) {
		const struct mr_client *client = rcu_dereference(clients[i]);

		if (client && waiting & BIT(i))
			client->writable(peer, queue);
	}
}

/*
 * Calls ->peer_up() and ->peer_down() of clients whose messages the peer takes (@mask) from now on,
 * or no longer. Returns the bits of those for which it is up. Caller holds the lock, so that no
 * client is unregistered meanwhile.
 */
u32 mr_clients_update_peer(struct mr_peer *peer, u32 mask)
{
	u32 up_mask = 0;
	unsigned int i;

	for (i = 0; i <= MR_MAX_CLIENT; i++) {
		const struct mr_client *client = client_at(i);
		bool is_up = client && mask & BIT(i), was_up = peer->up_clients & BIT(i);

		if (is_up)
			up_mask |= BIT(i);
		if (is_up && !was_up)
			client->peer_up(peer);
		else if (client && !is_up && was_up)
			client->peer_down(peer);
	}
	return up_mask;
}

void mr_clients_table_changed(void)
{
	unsigned int i;

	for (i = 0; i <= MR_MAX_CLIENT; i++) {
		const struct mr_client *client = client_at(i);

		if (client)
			client->table_changed();
	}
}
