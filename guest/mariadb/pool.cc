// SPDX-License-Identifier: GPL-2.0-only
/* Pool of clients with a connection and no transaction, for new sessions. */
#include <mutex>
#include <vector>

#include "client.h"

namespace millrace {

static std::mutex pool_lock;
static std::vector<Client *> pool;

Client *take_client(const Way &way, uint32_t patience_ms)
{
    std::lock_guard<std::mutex> guard(pool_lock);
    while (!pool.empty()) {
        Client *client = pool.back();
        pool.pop_back();
        if (client->address() == way.address && client->ring() == way.ring) {
            client->set_patience(patience_ms);
            client->set_spin_us(way.spin_us);
            return client;
        }
        delete client;
    }
    return new Client(way, "table", patience_ms);
}

void give_client(Client *client, size_t keep_most)
{
    {
        std::lock_guard<std::mutex> guard(pool_lock);
        if (client->is_idle() && pool.size() < keep_most) {
            pool.push_back(client);
            return;
        }
    }
    delete client;
}

size_t pool_count()
{
    std::lock_guard<std::mutex> guard(pool_lock);
    return pool.size();
}

void drop_pool()
{
    std::lock_guard<std::mutex> guard(pool_lock);
    for (Client *client : pool)
        delete client;
    pool.clear();
}

} // namespace millrace
