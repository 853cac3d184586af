// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Threads of two guests send to each other through queues of their own and through queues that they share, and every
// byte is compared.
//
// Each of the THREADS threads has a queue pair with a completion queue of its own, and one whose completions go to a
// queue that all threads poll; one more queue pair they all post to. Both sides send the same number of messages at the
// same time. A message says from which seed its bytes come, so the thread that receives it can check it; the sums of the seeds are
// compared at the end, so that no message is missing, doubled, or in another queue pair's place.

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "control.h"

enum { PORT = 18601, THREADS = 4, OWN = 0, SHARED = THREADS, COMMON = 2 * THREADS, QUEUE_PAIRS = COMMON + 1 };
enum { LARGEST = 8192, SENDS = 8, RECEIVES = 16, SLOTS = SENDS + RECEIVES };

// In front of each message.
struct header {
	uint64_t seed;
	uint32_t queue_pair, length;
};

struct queue_pair {
	struct ibv_qp *qp;
	atomic_int busy[SENDS];
	atomic_uint_fast64_t left, sent, received;
};

static struct ibv_mr *mr;
static uint8_t *arena;
static struct ibv_cq *own_cq[THREADS], *shared_cq;
static struct queue_pair pairs[QUEUE_PAIRS];
// Completions of sends and of receives that are still to come.
static atomic_int_fast64_t outstanding;

// The slots of receives are behind those of sends.
static uint8_t *slot(int queue_pair, int index)
{
	return arena + ((size_t)queue_pair * SLOTS + (size_t)index) * LARGEST;
}

static uint64_t next(uint64_t *state)
{
	uint64_t z = (*state += 0x9e3779b97f4a7c15);
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
	return z ^ (z >> 31);
}

static uint8_t body(uint64_t seed, uint32_t at)
{
	return (uint8_t)((seed ^ at) * 0x9e3779b97f4a7c15 >> 56);
}

static struct ibv_sge element(int queue_pair, int index, uint32_t length)
{
	return (struct ibv_sge){ (uintptr_t)slot(queue_pair, index), length, mr->lkey };
}

static void post_receive(int queue_pair, int index)
{
	struct ibv_sge sge = element(queue_pair, index, LARGEST);
	struct ibv_recv_wr *bad, wr = { .wr_id = (uint64_t)(queue_pair * SLOTS + index), .sg_list = &sge, .num_sge = 1 };
	if (ibv_post_recv(pairs[queue_pair].qp, &wr, &bad))
		fail("cannot post a receive to queue pair %d", queue_pair);
}

// Sends one message if there is one left to send and a slot for it.
static int try_send(int queue_pair, uint64_t *state)
{
	struct queue_pair *pair = &pairs[queue_pair];
	int index = 0, idle = 0;
	while (!atomic_compare_exchange_strong(&pair->busy[index], &idle, 1)) {
		idle = 0;
		if (++index == SENDS)
			return 0;
	}
	uint_fast64_t left = atomic_load(&pair->left);
	do {
		if (!left) {
			atomic_store(&pair->busy[index], 0);
			return 0;
		}
	} while (!atomic_compare_exchange_weak(&pair->left, &left, left - 1));

	struct header header = { next(state), (uint32_t)queue_pair, (uint32_t)(next(state) % (LARGEST - sizeof(header))) };
	uint8_t *to = slot(queue_pair, index);
	memcpy(to, &header, sizeof(header));
	for (uint32_t at = 0; at < header.length; at++)
		to[sizeof(header) + at] = body(header.seed, at);
	atomic_fetch_add(&pair->sent, header.seed);
	struct ibv_sge sge = element(queue_pair, index, (uint32_t)sizeof(header) + header.length);
	struct ibv_send_wr *bad, wr = {
		.wr_id = (uint64_t)(queue_pair * SLOTS + index),
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	};
	if (ibv_post_send(pair->qp, &wr, &bad))
		fail("cannot post a send to queue pair %d", queue_pair);
	return 1;
}

static void check(int queue_pair, int index, uint32_t length)
{
	struct header header;
	const uint8_t *from = slot(queue_pair, index);
	memcpy(&header, from, sizeof(header));
	if (header.queue_pair != (uint32_t)queue_pair || sizeof(header) + header.length != length)
		fail("queue pair %d got %u bytes that were sent to %u as %u", queue_pair, length, header.queue_pair,
		     header.length);
	for (uint32_t at = 0; at < header.length; at++)
		if (from[sizeof(header) + at] != body(header.seed, at))
			fail("queue pair %d: byte %u of %u is wrong", queue_pair, at, header.length);
	atomic_fetch_add(&pairs[queue_pair].received, header.seed);
}

// Takes one completion.
static int try_complete(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int count = ibv_poll_cq(cq, 1, &wc);
	if (count < 0)
		fail("cannot poll a completion queue");
	if (!count)
		return 0;
	int queue_pair = (int)(wc.wr_id / SLOTS), index = (int)(wc.wr_id % SLOTS);
	if (wc.status != IBV_WC_SUCCESS)
		fail("queue pair %d: %s", queue_pair, ibv_wc_status_str(wc.status));
	if (wc.qp_num != pairs[queue_pair].qp->qp_num)
		fail("a completion of queue pair %d names another", queue_pair);
	if (index < SENDS) {
		atomic_store(&pairs[queue_pair].busy[index], 0);
	} else {
		check(queue_pair, index, wc.byte_len);
		post_receive(queue_pair, index);
	}
	atomic_fetch_sub(&outstanding, 1);
	return 1;
}

static void *work(void *argument)
{
	int thread = (int)(intptr_t)argument;
	uint64_t state = (uint64_t)thread * 1000 + (uint64_t)getpid();
	while (atomic_load(&outstanding) > 0) {
		int done = try_send(OWN + thread, &state) + try_send(SHARED + thread, &state) + try_send(COMMON, &state);
		done += try_complete(own_cq[thread]) + try_complete(shared_cq);
		if (!done)
			sched_yield();
	}
	return NULL;
}

static struct ibv_cq *completion_queue(struct ibv_context *context, int queue_pairs)
{
	struct ibv_cq *cq = ibv_create_cq(context, queue_pairs * SLOTS, NULL, NULL, 0);
	if (!cq)
		fail("cannot create a completion queue: %s", strerror(errno));
	return cq;
}

static void set_up(const char *name, int gid_index, int control, uint64_t messages)
{
	struct ibv_context *context = open_device(name);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	size_t size = (size_t)QUEUE_PAIRS * SLOTS * LARGEST;
	arena = calloc(1, size);
	mr = pd && arena ? ibv_reg_mr(pd, arena, size, IBV_ACCESS_LOCAL_WRITE) : NULL;
	if (!mr)
		fail("cannot register memory: %s", strerror(errno));
	shared_cq = completion_queue(context, THREADS + 1);
	for (int thread = 0; thread < THREADS; thread++)
		own_cq[thread] = completion_queue(context, 1);
	for (int i = 0; i < QUEUE_PAIRS; i++) {
		struct ibv_cq *cq = i < SHARED ? own_cq[i] : shared_cq;
		struct ibv_qp_init_attr init = {
			.send_cq = cq,
			.recv_cq = cq,
			.cap = { .max_send_wr = SENDS, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
			.qp_type = IBV_QPT_RC,
		};
		pairs[i].qp = ibv_create_qp(pd, &init);
		if (!pairs[i].qp)
			fail("cannot create a queue pair: %s", strerror(errno));
		struct address peer, own = { .qpn = pairs[i].qp->qp_num, .psn = (uint32_t)i * 77777 };
		if (ibv_query_gid(context, 1, gid_index, &own.gid))
			fail("there is no GID %d", gid_index);
		exchange_out(control, &own, sizeof(own));
		exchange_in(control, &peer, sizeof(peer));
		struct connection how = { .timeout = 18, .retry_cnt = 7, .rnr_retry = 7 };
		connect_queue_pair(pairs[i].qp, &own, &peer, gid_index, how);
		for (int index = SENDS; index < SLOTS; index++)
			post_receive(i, index);
		pairs[i].left = i == COMMON ? messages * THREADS : messages;
		outstanding += 2 * (int64_t)pairs[i].left;
	}
}

int main(int argc, char **argv)
{
	if (argc < 4)
		fail("usage: %s DEVICE GID-INDEX MESSAGES [SERVER]", argv[0]);
	uint64_t messages = strtoull(argv[3], NULL, 10);
	int control = control_connection(argc > 4 ? argv[4] : NULL, PORT);
	set_up(argv[1], atoi(argv[2]), control, messages);
	barrier(control);
	pthread_t threads[THREADS];
	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i))
			fail("cannot start a thread");
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < QUEUE_PAIRS; i++) {
		uint64_t own = pairs[i].sent, peer;
		exchange_out(control, &own, sizeof(own));
		exchange_in(control, &peer, sizeof(peer));
		if (peer != pairs[i].received)
			fail("queue pair %d: what came is not what was sent", i);
	}
	printf("compared %" PRIu64 " messages of %d threads on %ld processors\n", 3 * THREADS * messages, THREADS,
	       sysconf(_SC_NPROCESSORS_ONLN));
	return 0;
}
