// SPDX-License-Identifier: GPL-2.0
/*
 * Clients: who gets which messages.
 */
#include <linux/module.h>

#include "channel.h"

static const struct mr_client __rcu *clients[MR_MAX_CLIENT + 1];

int mr_client_register(const struct mr_client *client)
{
	int err = 0;

	if (client->id > MR_MAX_CLIENT)
		return -EINVAL;
	mutex_lock(&mr_lock);
	if (rcu_access_pointer(clients[client->id])) {
		err = -EBUSY;
	} else {
		rcu_assign_pointer(clients[client->id], client);
		if (mr_channel) {
			client->table_changed();
			mr_links_tell(mr_channel, client);
		}
	}
	mutex_unlock(&mr_lock);
	return err;
}
EXPORT_SYMBOL_GPL(mr_client_register);

void mr_client_unregister(const struct mr_client *client)
{
	mutex_lock(&mr_lock);
	RCU_INIT_POINTER(clients[client->id], NULL);
	mutex_unlock(&mr_lock);
	synchronize_net();
}
EXPORT_SYMBOL_GPL(mr_client_unregister);

/* Softirq, in a reader's section. */
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

/* The lock is held, so that no client goes meanwhile. */
void mr_clients_peer(struct mr_peer *peer, bool up)
{
	unsigned int i;

	for (i = 0; i <= MR_MAX_CLIENT; i++) {
		const struct mr_client *client =
			rcu_dereference_protected(clients[i], lockdep_is_held(&mr_lock));

		if (!client)
			continue;
		if (up)
			client->peer_up(peer);
		else
			client->peer_down(peer);
	}
}

void mr_clients_table_changed(void)
{
	unsigned int i;

	for (i = 0; i <= MR_MAX_CLIENT; i++) {
		const struct mr_client *client =
			rcu_dereference_protected(clients[i], lockdep_is_held(&mr_lock));

		if (client)
			client->table_changed();
	}
}
