// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Provokes the errors of a connection between two guests and checks what each end is told: the statuses in their order
// and the asynchronous events.
//
// With the option -f, nothing is wrong with the requests: the faults in faults.txt, which the daemon must have for the
// devices vm0 (client) and vm1 (server), make the connections fail. Both ends then get every status and every event
// that the device can raise.
//
// Each case has objects of its own. The client sends, the server answers; both take part in all cases, in the same
// order, and each compares with its own column of the table. What a case wants at the server is set up before the
// client posts anything.

#include <poll.h>
#include <stdbool.h>

#include "control.h"

enum { PORT = 18601, BUFFER = 4096, MOST = 16, PATIENCE_MS = 10000, NO_EVENT = -1, SIZE = 64, EVENTS = 2 };

enum where { FINE, FOREIGN_PD, BAD_KEY, NO_ACCESS };

// One case. Statuses are given in the order in which they must come; the list ends with END.
enum { END = -1 };
struct scenario {
	const char *name;
	// The client's requests: how many, which, how long, and what is wrong with their memory.
	int sends;
	enum ibv_wr_opcode opcode;
	uint32_t length;
	enum where local, remote;
	// The server's receives: how many, how long, what is wrong with their memory, and whether they are shared.
	int receives;
	uint32_t room;
	enum where receive;
	bool shared;
	uint32_t limit;
	// Entries of the server's queue for receives; 0 for plenty.
	int entries;
	// The server's queue pair gives no rights, or goes to its error state before or after the client's requests, or
	// never sends.
	bool disabled, gone, ended, deaf;
	// Behind its requests, the client drains its send queue, or its guest gets an address and loses it.
	bool drained, readdressed;
	// The client's device loses its objects.
	bool fatal;
	int client[MOST], server[MOST], event;
	// The server's event behind `event`, and those of the client. 0, which is CQ_ERR, stands for none.
	int server_then, client_events[EVENTS];
};

#define OK IBV_WC_SUCCESS
#define FLUSH IBV_WC_WR_FLUSH_ERR

static const struct scenario SCENARIOS[] = {
	{ .name = "bad-rkey", .sends = 3, .opcode = IBV_WR_RDMA_WRITE, .length = SIZE, .remote = BAD_KEY, .receives = 2,
	  .room = SIZE, .client = { IBV_WC_REM_ACCESS_ERR, FLUSH, FLUSH, END }, .server = { FLUSH, FLUSH, END },
	  .event = IBV_EVENT_QP_ACCESS_ERR },
	{ .name = "bad-rkey-read", .sends = 1, .opcode = IBV_WR_RDMA_READ, .length = SIZE, .remote = BAD_KEY,
	  .client = { IBV_WC_REM_ACCESS_ERR, END }, .server = { END }, .event = IBV_EVENT_QP_ACCESS_ERR },
	{ .name = "bad-rkey-write-with-immediate", .sends = 2, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .length = SIZE,
	  .remote = BAD_KEY, .receives = 2, .room = SIZE, .client = { IBV_WC_REM_ACCESS_ERR, FLUSH, END },
	  .server = { IBV_WC_LOC_ACCESS_ERR, FLUSH, END }, .event = NO_EVENT },
	{ .name = "both-keys-bad-read", .sends = 1, .opcode = IBV_WR_RDMA_READ, .length = SIZE, .local = BAD_KEY,
	  .remote = BAD_KEY, .client = { IBV_WC_REM_ACCESS_ERR, END }, .server = { END },
	  .event = IBV_EVENT_QP_ACCESS_ERR },
	{ .name = "both-keys-bad-atomic", .sends = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .length = 8,
	  .local = BAD_KEY, .remote = BAD_KEY, .client = { IBV_WC_REM_ACCESS_ERR, END }, .server = { END },
	  .event = IBV_EVENT_QP_ACCESS_ERR },
	{ .name = "atomic-with-nine-bytes", .sends = 2, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .length = 9,
	  .client = { IBV_WC_LOC_LEN_ERR, FLUSH, END }, .server = { END }, .event = NO_EVENT },
	{ .name = "rkey-of-another-pd", .sends = 1, .opcode = IBV_WR_RDMA_WRITE, .length = SIZE, .remote = FOREIGN_PD,
	  .client = { IBV_WC_REM_ACCESS_ERR, END }, .server = { END }, .event = IBV_EVENT_QP_ACCESS_ERR },
	{ .name = "rkey-without-right", .sends = 1, .opcode = IBV_WR_RDMA_WRITE, .length = SIZE, .remote = NO_ACCESS,
	  .client = { IBV_WC_REM_ACCESS_ERR, END }, .server = { END }, .event = IBV_EVENT_QP_ACCESS_ERR },
	{ .name = "operation-not-enabled", .sends = 1, .opcode = IBV_WR_RDMA_WRITE, .length = SIZE, .disabled = true,
	  .client = { IBV_WC_REM_INV_REQ_ERR, END }, .server = { END }, .event = IBV_EVENT_QP_REQ_ERR },
	{ .name = "bad-lkey", .sends = 2, .opcode = IBV_WR_SEND, .length = SIZE, .local = BAD_KEY, .receives = 1,
	  .room = SIZE, .client = { IBV_WC_LOC_PROT_ERR, FLUSH, END }, .server = { END }, .event = NO_EVENT },
	{ .name = "lkey-of-another-pd", .sends = 1, .opcode = IBV_WR_RDMA_WRITE, .length = SIZE, .local = FOREIGN_PD,
	  .client = { IBV_WC_LOC_PROT_ERR, END }, .server = { END }, .event = NO_EVENT },
	{ .name = "lkey-without-right", .sends = 1, .opcode = IBV_WR_RDMA_READ, .length = SIZE, .local = NO_ACCESS,
	  .client = { IBV_WC_LOC_PROT_ERR, END }, .server = { END }, .event = NO_EVENT },
	{ .name = "receive-too-short", .sends = 2, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 2, .room = SIZE - 1,
	  .client = { IBV_WC_REM_INV_REQ_ERR, FLUSH, END }, .server = { IBV_WC_LOC_LEN_ERR, FLUSH, END },
	  .event = NO_EVENT },
	{ .name = "receive-with-bad-lkey", .sends = 1, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 2, .room = SIZE,
	  .receive = BAD_KEY, .client = { IBV_WC_REM_OP_ERR, END }, .server = { IBV_WC_LOC_PROT_ERR, FLUSH, END },
	  .event = NO_EVENT },
	{ .name = "rnr-retries", .sends = 3, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 1, .room = SIZE,
	  .client = { OK, IBV_WC_RNR_RETRY_EXC_ERR, FLUSH, END }, .server = { OK, END }, .event = NO_EVENT },
	{ .name = "retries", .sends = 2, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 2, .room = SIZE, .gone = true,
	  .client = { IBV_WC_RETRY_EXC_ERR, FLUSH, END }, .server = { FLUSH, FLUSH, END }, .event = NO_EVENT },
	{ .name = "flush-order", .sends = 2, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 6, .room = SIZE,
	  .ended = true, .client = { OK, OK, END }, .server = { OK, OK, FLUSH, FLUSH, FLUSH, FLUSH, END },
	  .event = NO_EVENT },
	{ .name = "cq-overflow", .sends = 7, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 7, .room = SIZE,
	  .entries = 4, .client = { OK, OK, OK, OK, IBV_WC_REM_OP_ERR, FLUSH, FLUSH, END },
	  .server = { OK, OK, OK, OK, END }, .event = IBV_EVENT_CQ_ERR },
	{ .name = "srq-limit", .sends = 2, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 4, .room = SIZE,
	  .shared = true, .limit = 3, .client = { OK, OK, END }, .server = { OK, OK, END },
	  .event = IBV_EVENT_SRQ_LIMIT_REACHED },
	{ .name = "last-wqe", .sends = 1, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 3, .room = SIZE,
	  .shared = true, .ended = true, .client = { OK, END }, .server = { OK, END },
	  .event = IBV_EVENT_QP_LAST_WQE_REACHED },
};

// The number of each is that of its connection in faults.txt.
#define SENDS .sends = 2, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 2, .room = SIZE
#define WRITES .sends = 2, .opcode = IBV_WR_RDMA_WRITE, .length = SIZE
static const struct scenario FAULTS[] = {
	{ .name = "local-length", SENDS, .client = { IBV_WC_LOC_LEN_ERR, FLUSH, END }, .server = { END }, .event = NO_EVENT },
	{ .name = "local-protection", SENDS, .client = { IBV_WC_LOC_PROT_ERR, FLUSH, END }, .server = { END },
	  .event = NO_EVENT },
	{ .name = "local-operation", SENDS, .client = { IBV_WC_LOC_QP_OP_ERR, FLUSH, END }, .server = { END },
	  .event = NO_EVENT },
	{ .name = "qp-error", SENDS, .client = { FLUSH, FLUSH, END }, .server = { END }, .event = NO_EVENT },
	{ .name = "bad-response", SENDS, .client = { IBV_WC_BAD_RESP_ERR, FLUSH, END }, .server = { OK, END },
	  .event = NO_EVENT },
	{ .name = "response-loss", SENDS, .client = { IBV_WC_RETRY_EXC_ERR, FLUSH, END }, .server = { OK, END },
	  .event = NO_EVENT },
	{ .name = "loss", SENDS, .client = { IBV_WC_RETRY_EXC_ERR, FLUSH, END }, .server = { END }, .event = NO_EVENT },
	{ .name = "rnr", SENDS, .client = { IBV_WC_RNR_RETRY_EXC_ERR, FLUSH, END }, .server = { END },
	  .event = NO_EVENT },
	{ .name = "receive-length", SENDS, .client = { IBV_WC_REM_INV_REQ_ERR, FLUSH, END },
	  .server = { IBV_WC_LOC_LEN_ERR, FLUSH, END }, .event = NO_EVENT },
	{ .name = "receive-protection", SENDS, .client = { IBV_WC_REM_OP_ERR, FLUSH, END },
	  .server = { IBV_WC_LOC_PROT_ERR, FLUSH, END }, .event = NO_EVENT },
	{ .name = "receive-malformed", SENDS, .client = { IBV_WC_REM_OP_ERR, FLUSH, END },
	  .server = { IBV_WC_LOC_QP_OP_ERR, FLUSH, END }, .event = NO_EVENT },
	{ .name = "receive-queue", .sends = 2, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 1, .room = SIZE,
	  .client = { IBV_WC_REM_OP_ERR, FLUSH, END }, .server = { FLUSH, END }, .event = IBV_EVENT_QP_FATAL },
	{ .name = "receive-queue-shared", .sends = 2, .opcode = IBV_WR_SEND, .length = SIZE, .receives = 1, .room = SIZE,
	  .shared = true, .client = { IBV_WC_REM_OP_ERR, FLUSH, END }, .server = { FLUSH, END },
	  .event = IBV_EVENT_SRQ_ERR, .server_then = IBV_EVENT_QP_LAST_WQE_REACHED },
	{ .name = "remote-access", WRITES, .client = { IBV_WC_REM_ACCESS_ERR, FLUSH, END }, .server = { END },
	  .event = IBV_EVENT_QP_ACCESS_ERR },
	{ .name = "remote-access-with-immediate", .sends = 2, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .length = SIZE,
	  .receives = 2, .room = SIZE, .client = { IBV_WC_REM_ACCESS_ERR, FLUSH, END },
	  .server = { IBV_WC_LOC_ACCESS_ERR, FLUSH, END }, .event = NO_EVENT },
	{ .name = "invalid-request", WRITES, .client = { IBV_WC_REM_INV_REQ_ERR, FLUSH, END }, .server = { END },
	  .event = IBV_EVENT_QP_REQ_ERR },
	{ .name = "cq-overrun", SENDS, .client = { IBV_WC_REM_OP_ERR, FLUSH, END }, .server = { END },
	  .event = IBV_EVENT_CQ_ERR },
	{ .name = "delay", SENDS, .client = { OK, OK, END }, .server = { OK, OK, END }, .event = NO_EVENT },
	{ .name = "established", SENDS, .deaf = true, .client = { OK, OK, END }, .server = { OK, OK, END },
	  .event = IBV_EVENT_COMM_EST },
	{ .name = "drained", SENDS, .drained = true, .client = { OK, OK, END }, .server = { OK, OK, END },
	  .event = NO_EVENT, .client_events = { IBV_EVENT_SQ_DRAINED } },
	{ .name = "limit", SENDS, .shared = true, .limit = 2, .client = { OK, OK, END }, .server = { OK, OK, END },
	  .event = IBV_EVENT_SRQ_LIMIT_REACHED },
	{ .name = "readdressed", SENDS, .readdressed = true, .client = { OK, OK, END }, .server = { OK, OK, END },
	  .event = NO_EVENT, .client_events = { IBV_EVENT_GID_CHANGE, IBV_EVENT_GID_CHANGE } },
	{ .name = "link-down", SENDS, .client = { IBV_WC_RETRY_EXC_ERR, FLUSH, END }, .server = { END },
	  .event = NO_EVENT, .client_events = { IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE } },
	// Linux keeps the device's event to itself (ib_cache_event_task): programs are told of changes that it makes.
	{ .name = "gid-removed", SENDS, .client = { IBV_WC_RETRY_EXC_ERR, FLUSH, END }, .server = { END },
	  .event = NO_EVENT },
	{ .name = "peer-gone", SENDS, .client = { IBV_WC_RETRY_EXC_ERR, FLUSH, END }, .server = { END },
	  .event = NO_EVENT },
	{ .name = "device-fatal", SENDS, .fatal = true, .client = { END }, .server = { END }, .event = NO_EVENT,
	  .client_events = { IBV_EVENT_DEVICE_FATAL } },
};

struct side {
	const struct scenario *scenario;
	struct ibv_context *context;
	struct ibv_pd *pd, *other_pd;
	struct ibv_mr *mr, *other_mr, *plain_mr;
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	struct address own, peer;
	int gid_index, socket;
	bool is_client;
	uint8_t *buffer;
};

static uint32_t key(const struct side *side, enum where where, bool remote)
{
	struct ibv_mr *mr = where == FOREIGN_PD ? side->other_mr : where == NO_ACCESS ? side->plain_mr : side->mr;
	uint32_t key = remote ? mr->rkey : mr->lkey;
	// The index of a region that does not exist.
	return where == BAD_KEY ? key ^ 0x1fff00 : key;
}

static void create(struct side *side)
{
	const struct scenario *scenario = side->scenario;
	int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	side->pd = ibv_alloc_pd(side->context);
	side->other_pd = ibv_alloc_pd(side->context);
	if (!side->pd || !side->other_pd)
		fail("%s: cannot create protection domains: %s", scenario->name, strerror(errno));
	side->mr = ibv_reg_mr(side->pd, side->buffer, BUFFER, all);
	side->other_mr = ibv_reg_mr(side->other_pd, side->buffer, BUFFER, all);
	side->plain_mr = ibv_reg_mr(side->pd, side->buffer, BUFFER, 0);
	int entries = scenario->entries && !side->is_client ? scenario->entries : MOST;
	side->send_cq = ibv_create_cq(side->context, MOST, NULL, NULL, 0);
	side->recv_cq = ibv_create_cq(side->context, entries, NULL, NULL, 0);
	if (!side->mr || !side->other_mr || !side->plain_mr || !side->send_cq || !side->recv_cq)
		fail("%s: cannot create regions and queues: %s", scenario->name, strerror(errno));
	if (side->recv_cq->cqe != entries)
		fail("%s: a queue of %d entries got %d", scenario->name, entries, side->recv_cq->cqe);
	side->srq = NULL;
	if (scenario->shared && !side->is_client) {
		struct ibv_srq_init_attr init = { .attr = { .max_wr = MOST, .max_sge = 1 } };
		if (!(side->srq = ibv_create_srq(side->pd, &init)))
			fail("%s: cannot create a shared receive queue: %s", scenario->name, strerror(errno));
	}
	struct ibv_qp_init_attr init = {
		.send_cq = side->send_cq,
		.recv_cq = side->recv_cq,
		.srq = side->srq,
		.cap = { .max_send_wr = MOST, .max_recv_wr = MOST, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	if (!(side->qp = ibv_create_qp(side->pd, &init)))
		fail("%s: cannot create a queue pair: %s", scenario->name, strerror(errno));
	side->own = (struct address){ side->qp->qp_num, 0x222222, key(side, scenario->remote, true), 0,
				      (uintptr_t)side->buffer, { { 0 } } };
	if (ibv_query_gid(side->context, 1, side->gid_index, &side->own.gid))
		fail("there is no GID %d", side->gid_index);
}

static void destroy(const struct side *side)
{
	if (ibv_destroy_qp(side->qp) || (side->srq && ibv_destroy_srq(side->srq)) || ibv_destroy_cq(side->send_cq) ||
	    ibv_destroy_cq(side->recv_cq) || ibv_dereg_mr(side->mr) || ibv_dereg_mr(side->other_mr) ||
	    ibv_dereg_mr(side->plain_mr) || ibv_dealloc_pd(side->pd) || ibv_dealloc_pd(side->other_pd))
		fail("%s: cannot destroy what was created: %s", side->scenario->name, strerror(errno));
}

static void to_error(const struct side *side)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	if (ibv_modify_qp(side->qp, &attr, IBV_QP_STATE))
		fail("%s: cannot go to the error state: %s", side->scenario->name, strerror(errno));
}

static void post_receives(const struct side *side)
{
	const struct scenario *scenario = side->scenario;
	for (int i = 0; i < scenario->receives; i++) {
		struct ibv_sge sge = { (uintptr_t)side->buffer, scenario->room, key(side, scenario->receive, false) };
		struct ibv_recv_wr *bad, wr = { .wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1 };
		if (side->srq ? ibv_post_srq_recv(side->srq, &wr, &bad) : ibv_post_recv(side->qp, &wr, &bad))
			fail("%s: cannot post receive %d", scenario->name, i);
	}
	struct ibv_srq_attr limit = { .srq_limit = scenario->limit };
	if (scenario->limit && ibv_modify_srq(side->srq, &limit, IBV_SRQ_LIMIT))
		fail("%s: cannot set the limit: %s", scenario->name, strerror(errno));
}

static void post_sends(const struct side *side)
{
	const struct scenario *scenario = side->scenario;
	struct ibv_sge sge = { (uintptr_t)side->buffer, scenario->length, key(side, scenario->local, false) };
	struct ibv_send_wr *bad, list[MOST];
	for (int i = 0; i < scenario->sends; i++) {
		list[i] = (struct ibv_send_wr){
			.wr_id = (uint64_t)i,
			.next = i + 1 < scenario->sends ? &list[i + 1] : NULL,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = scenario->opcode,
			.send_flags = IBV_SEND_SIGNALED,
		};
		if (scenario->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			list[i].wr.atomic.remote_addr = side->peer.base;
			list[i].wr.atomic.rkey = side->peer.rkey;
			list[i].wr.atomic.compare_add = 1;
		} else {
			list[i].wr.rdma.remote_addr = side->peer.base;
			list[i].wr.rdma.rkey = side->peer.rkey;
		}
	}
	if (ibv_post_send(side->qp, list, &bad))
		fail("%s: cannot post the requests", scenario->name);
}

// Every completion in its order, and none besides.
static void expect(const struct side *side, struct ibv_cq *cq, const int *statuses)
{
	const char *name = side->scenario->name;
	struct ibv_wc wc;
	int index = 0, count, waited = 0;
	while (statuses[index] != END) {
		if ((count = ibv_poll_cq(cq, 1, &wc)) < 0)
			fail("%s: cannot poll", name);
		if (count == 0) {
			if (waited++ > PATIENCE_MS)
				fail("%s: completion %d did not come", name, index);
			usleep(1000);
			continue;
		}
		if (wc.wr_id != (uint64_t)index)
			fail("%s: completion %d is of request %d", name, index, (int)wc.wr_id);
		if ((int)wc.status != statuses[index])
			fail("%s: request %d ended with \"%s\", not \"%s\"", name, index, ibv_wc_status_str(wc.status),
			     ibv_wc_status_str(statuses[index]));
		if (wc.qp_num != side->qp->qp_num)
			fail("%s: completion %d is of another queue pair", name, index);
		index++;
	}
	if (ibv_poll_cq(cq, 1, &wc) > 0)
		fail("%s: one completion too many: request %d, \"%s\"", name, (int)wc.wr_id, ibv_wc_status_str(wc.status));
}

// Returns true if an event is of an object of this side.
static bool is_own(const struct side *side, const struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		return event->element.cq == side->recv_cq;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return event->element.srq == side->srq;
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_GID_CHANGE:
	case IBV_EVENT_DEVICE_FATAL:
		return event->element.port_num == 1;
	default:
		return event->element.qp == side->qp;
	}
}

// The events in their order, and none besides.
static void expect_events(const struct side *side, const int *wanted, int count)
{
	const char *name = side->scenario->name;
	struct pollfd ready = { .fd = side->context->async_fd, .events = POLLIN };
	struct ibv_async_event event;
	int found = 0;
	while (poll(&ready, 1, found == count ? 0 : PATIENCE_MS) == 1) {
		if (ibv_get_async_event(side->context, &event))
			fail("%s: cannot read an event", name);
		ibv_ack_async_event(&event);
		if (found == count || (int)event.event_type != wanted[found] || !is_own(side, &event))
			fail("%s: unexpected event \"%s\"", name, ibv_event_type_str(event.event_type));
		found++;
	}
	if (found < count)
		fail("%s: no event \"%s\"", name, ibv_event_type_str((enum ibv_event_type)wanted[found]));
}

static void drain(const struct side *side)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	if (ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY))
		fail("%s: cannot drain the send queue: %s", side->scenario->name, strerror(errno));
}

// Adds an address to the interface of the device's GID, and removes it.
static void readdress(const struct side *side)
{
	char command[256];
	snprintf(command, sizeof(command),
		 "dev=$(cat /sys/class/infiniband/%s/ports/1/gid_attrs/ndevs/%d) && "
		 "ip address add 10.99.0.1/32 dev $dev && ip address del 10.99.0.1/32 dev $dev",
		 ibv_get_device_name(side->context->device), side->gid_index);
	if (system(command))
		fail("%s: cannot change the addresses", side->scenario->name);
}

static void expect_at_client(const struct side *side)
{
	const struct scenario *scenario = side->scenario;
	int count = 0;
	while (count < EVENTS && scenario->client_events[count])
		count++;
	expect(side, side->send_cq, scenario->client);
	if (scenario->drained)
		drain(side);
	if (scenario->readdressed)
		readdress(side);
	expect_events(side, scenario->client_events, count);
}

static void expect_at_server(const struct side *side)
{
	const struct scenario *scenario = side->scenario;
	const int events[EVENTS] = { scenario->event, scenario->server_then };
	expect(side, side->recv_cq, scenario->server);
	expect_events(side, events, scenario->event == NO_EVENT ? 0 : scenario->server_then ? 2 : 1);
}

static void play(struct side *side)
{
	const struct scenario *scenario = side->scenario;
	create(side);
	exchange_out(side->socket, &side->own, sizeof(side->own));
	exchange_in(side->socket, &side->peer, sizeof(side->peer));
	struct connection how = { .timeout = 12, .retry_cnt = 2, .rnr_retry = 2 };
	how.receives_only = scenario->deaf && !side->is_client;
	if (!scenario->disabled)
		how.access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	connect_queue_pair(side->qp, &side->own, &side->peer, side->gid_index, how);
	if (!side->is_client) {
		post_receives(side);
		if (scenario->gone)
			to_error(side);
	}
	barrier(side->socket);
	if (side->is_client) {
		post_sends(side);
		expect_at_client(side);
	}
	barrier(side->socket);
	if (!side->is_client) {
		if (scenario->ended)
			to_error(side);
		expect_at_server(side);
	}
	barrier(side->socket);
	// A device that has failed refuses the commands, and the driver ends the rest with the process.
	if (!scenario->fatal || !side->is_client)
		destroy(side);
}

int main(int argc, char **argv)
{
	const struct scenario *table = SCENARIOS;
	size_t count = sizeof(SCENARIOS) / sizeof(SCENARIOS[0]);
	if (argc > 1 && !strcmp(argv[1], "-f")) {
		table = FAULTS;
		count = sizeof(FAULTS) / sizeof(FAULTS[0]);
		argc--;
		argv++;
	}
	if (argc < 3)
		fail("usage: errors [-f] DEVICE GID-INDEX [SERVER]");
	const char *server = argc > 3 ? argv[3] : NULL;
	struct side side = { .gid_index = atoi(argv[2]), .is_client = server != NULL };
	side.context = open_device(argv[1]);
	side.buffer = aligned_alloc(BUFFER, BUFFER);
	if (!side.buffer)
		fail("no memory");
	memset(side.buffer, 0, BUFFER);
	side.socket = control_connection(server, PORT);
	for (size_t i = 0; i < count; i++) {
		side.scenario = &table[i];
		play(&side);
		printf("%s: as it should be\n", side.scenario->name);
	}
	printf("provoked %zu errors\n", count);
	return 0;
}
