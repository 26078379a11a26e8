// SPDX-License-Identifier: GPL-2.0
/*
 * Clients: the receivers of messages.
 */
#include <linux/module.h>

#include "channel.h"

/* Longest time for messages to arrive that were sent before a client was unregistered. */
#define LAST_MS 5000

static const struct mr_client __rcu *clients[MR_MAX_CLIENT + 1];
static u32 taking; /* bits of clients that take messages */

/* Caller holds the lock. */
static const struct mr_client *client_at(unsigned int id)
{
	return rcu_dereference_protected(clients[id], lockdep_is_held(&mr_lock));
}

u32 mr_clients_taking(void)
{
	return taking;
}

static void set_taking(u32 mask)
{
	taking = mask;
	if (mr_channel)
		mr_links_clients_changed(mr_channel);
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
		set_taking(taking | BIT(client->id));
	}
	mutex_unlock(&mr_lock);
	return err;
}
EXPORT_SYMBOL_GPL(mr_client_register);

/* Waits until all messages are received that peers had sent when they heard of the change. */
static void take_the_last(void)
{
	unsigned long until = jiffies + msecs_to_jiffies(LAST_MS);
	unsigned int seen = 0;
	bool taken;

	/* Twice: a sender may be between its check and its send. */
	while (seen < 2 && time_before(jiffies, until)) {
		schedule_timeout_idle(1);
		mutex_lock(&mr_lock);
		taken = !mr_channel || mr_links_all_taken(mr_channel);
		mutex_unlock(&mr_lock);
		seen = taken ? seen + 1 : 0;
	}
}

void mr_client_unregister(const struct mr_client *client)
{
	mutex_lock(&mr_lock);
	set_taking(taking & ~BIT(client->id));
	mutex_unlock(&mr_lock);
	take_the_last();
	mutex_lock(&mr_lock);
	RCU_INIT_POINTER(clients[client->id], NULL);
	/* Links forget that the client was told: the next one of its number is told anew. */
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
 * Tells the clients in @want whether the peer takes their messages. Returns the bits of those that
 * know that it does. Caller holds the lock, so that no client is unregistered meanwhile.
 */
u32 mr_clients_peer(struct mr_peer *peer, u32 want)
{
	u32 told = 0;
	unsigned int i;

	for (i = 0; i <= MR_MAX_CLIENT; i++) {
		const struct mr_client *client = client_at(i);
		bool up = client && want & BIT(i), was = peer->told_up & BIT(i);

		if (up)
			told |= BIT(i);
		if (up && !was)
			client->peer_up(peer);
		else if (client && !up && was)
			client->peer_down(peer);
	}
	return told;
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
