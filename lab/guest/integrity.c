// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Moves data between two guests by every RC operation and compares every byte.
//
// One side listens, the other names it. Per round the client draws an operation, a length (0 to 16 MiB), unaligned
// places and a number of scatter/gather elements from a seeded generator and tells the server over TCP. Both fill
// the places that the round uses: the source with a stream of its own, the destination and GUARD bytes around each
// of its pieces with FILL. Afterwards the side that received compares stream and guards. The arena's pages are
// touched in random order, so that they are scattered over the guest's memory.

#include <inttypes.h>
#include <sys/mman.h>

#include "control.h"

enum { PORT = 18600, ARENA = 48 << 20, LARGEST = 16 << 20, GUARD = 64, FILL = 0xa5, MAX_PIECES = 16, PAGE = 4096 };

enum kind { WRITE, WRITE_IMM, READ, SEND, SEND_IMM, FETCH_ADD, COMPARE_SWAP, KINDS };

static const char *const NAMES[KINDS] = { "write", "write-imm", "read", "send", "send-imm", "fetch-add", "compare-swap" };

struct round {
	uint32_t kind, length, pieces[2], last;
	uint64_t seed;
};

struct piece {
	uint32_t offset, length;
};

struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct address own, peer;
	uint8_t *arena;
	int gid_index, socket, is_client;
};

static uint64_t next(uint64_t *state)
{
	uint64_t z = (*state += 0x9e3779b97f4a7c15);
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
	return z ^ (z >> 31);
}

static uint32_t below(uint64_t *state, uint32_t limit)
{
	return (uint32_t)(next(state) % limit);
}

// Byte `at` of the stream of a seed, any alignment, eight bytes at a time where possible.
static uint64_t word(uint64_t seed, uint64_t index)
{
	return (seed ^ index) * 0x9e3779b97f4a7c15 + (index << 17);
}

static void stream(uint8_t *to, uint64_t seed, uint64_t at, uint32_t length)
{
	uint32_t done = 0;
	while (done < length) {
		uint64_t value = word(seed, (at + done) / 8);
		uint32_t skip = (at + done) % 8, count = 8 - skip;
		if (count > length - done)
			count = length - done;
		memcpy(to + done, (uint8_t *)&value + skip, count);
		done += count;
	}
}

// Both sides derive the same places from the round's seed; `role` 0 is the client's, 1 the server's. Pieces follow
// each other with gaps of random size, so they never overlap and start anywhere.
static uint32_t places(const struct round *round, int role, struct piece *pieces)
{
	uint64_t state = round->seed + 77 + role;
	uint32_t count = round->pieces[role], left = round->length;
	uint32_t at = GUARD + below(&state, (ARENA - LARGEST) / 2);
	for (uint32_t i = 0; i < count; i++) {
		uint32_t length = i + 1 == count ? left : below(&state, left + 1);
		if (round->kind == FETCH_ADD || round->kind == COMPARE_SWAP)
			at = (at + 7) & ~7u;
		pieces[i] = (struct piece){ at, length };
		at += length + 2 * GUARD + below(&state, 3 * PAGE);
		left -= length;
	}
	return count;
}

static void prepare(const struct side *side, const struct round *round, int role, int is_source)
{
	struct piece pieces[MAX_PIECES];
	uint32_t count = places(round, role, pieces);
	uint64_t at = 0;
	for (uint32_t i = 0; i < count; i++) {
		uint8_t *start = side->arena + pieces[i].offset;
		if (is_source) {
			stream(start, round->seed, at, pieces[i].length);
		} else {
			memset(start - GUARD, FILL, pieces[i].length + 2 * GUARD);
		}
		at += pieces[i].length;
	}
}

static void compare(const struct side *side, const struct round *round, int role)
{
	static uint8_t expected[LARGEST], guard[GUARD];
	struct piece pieces[MAX_PIECES];
	uint32_t count = places(round, role, pieces);
	uint64_t at = 0;
	memset(guard, FILL, GUARD);
	for (uint32_t i = 0; i < count; i++) {
		uint8_t *start = side->arena + pieces[i].offset;
		uint32_t length = pieces[i].length;
		stream(expected, round->seed, at, length);
		if (memcmp(start, expected, length)) {
			uint32_t bad = 0;
			while (start[bad] == expected[bad])
				bad++;
			fail("%s of %u bytes, piece %u of %u at arena offset %u: byte %u is %02x, not %02x", NAMES[round->kind],
			     round->length, i, count, pieces[i].offset, bad, start[bad], expected[bad]);
		}
		if (memcmp(start - GUARD, guard, GUARD) || memcmp(start + length, guard, GUARD))
			fail("%s of %u bytes, piece %u of %u: bytes beside it were changed", NAMES[round->kind], round->length, i,
			     count);
		at += length;
	}
}

static struct ibv_wc complete(const struct side *side, const struct round *round)
{
	struct ibv_wc wc;
	struct ibv_cq *cq;
	void *context;
	int count;
	while ((count = ibv_poll_cq(side->cq, 1, &wc)) == 0) {
		if (ibv_req_notify_cq(side->cq, 0))
			fail("cannot arm the completion queue");
		// Completions from before the arming raise no event.
		if ((count = ibv_poll_cq(side->cq, 1, &wc)) != 0)
			break;
		if (ibv_get_cq_event(side->cq->channel, &cq, &context))
			fail("cannot wait for a completion");
		ibv_ack_cq_events(cq, 1);
	}
	if (count < 0)
		fail("cannot poll the completion queue");
	if (wc.status != IBV_WC_SUCCESS)
		fail("%s of %u bytes: %s", NAMES[round->kind], round->length, ibv_wc_status_str(wc.status));
	return wc;
}

static uint32_t elements(const struct side *side, const struct round *round, int role, struct ibv_sge *list)
{
	struct piece pieces[MAX_PIECES];
	uint32_t count = places(round, role, pieces);
	for (uint32_t i = 0; i < count; i++)
		list[i] = (struct ibv_sge){ (uintptr_t)side->arena + pieces[i].offset, pieces[i].length, side->mr->lkey };
	return count;
}

static int is_atomic(const struct round *round)
{
	return round->kind == FETCH_ADD || round->kind == COMPARE_SWAP;
}

static int is_received(const struct round *round)
{
	return round->kind == SEND || round->kind == SEND_IMM || round->kind == WRITE_IMM;
}

static void client_round(const struct side *side, const struct round *round)
{
	static const enum ibv_wr_opcode OPCODES[KINDS] = {
		IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,      IBV_WR_SEND,
		IBV_WR_SEND_WITH_IMM, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP,
	};
	struct ibv_sge list[MAX_PIECES];
	struct piece remote[MAX_PIECES];
	int is_source = round->kind != READ && !is_atomic(round);
	prepare(side, round, 0, is_source);
	barrier(side->socket);
	places(round, 1, remote);
	struct ibv_send_wr *bad, wr = {
		.wr_id = round->seed,
		.sg_list = list,
		.num_sge = (int)elements(side, round, 0, list),
		.opcode = OPCODES[round->kind],
		.send_flags = IBV_SEND_SIGNALED,
		.imm_data = htonl((uint32_t)round->seed),
	};
	uint64_t target = side->peer.base + remote[0].offset;
	if (is_atomic(round)) {
		wr.wr.atomic.remote_addr = target;
		wr.wr.atomic.rkey = side->peer.rkey;
		// The server's word holds the stream, so the swap succeeds.
		wr.wr.atomic.compare_add = round->kind == FETCH_ADD ? 5 : word(round->seed, 0);
		wr.wr.atomic.swap = ~word(round->seed, 0);
	} else {
		wr.wr.rdma.remote_addr = target;
		wr.wr.rdma.rkey = side->peer.rkey;
	}
	if (ibv_post_send(side->qp, &wr, &bad))
		fail("cannot post a %s of %u bytes in %d pieces", NAMES[round->kind], round->length, wr.num_sge);
	complete(side, round);
	if (!is_source)
		compare(side, round, 0);
	barrier(side->socket);
}

static void server_round(const struct side *side, const struct round *round)
{
	struct ibv_sge list[MAX_PIECES];
	struct piece pieces[MAX_PIECES];
	int is_source = round->kind == READ || is_atomic(round);
	places(round, 1, pieces);
	prepare(side, round, 1, is_source);
	if (is_received(round)) {
		struct ibv_recv_wr *bad, wr = { .wr_id = round->seed, .sg_list = list };
		// A write with immediate takes a receive request but not its memory.
		wr.num_sge = round->kind == WRITE_IMM ? 0 : (int)elements(side, round, 1, list);
		if (ibv_post_recv(side->qp, &wr, &bad))
			fail("cannot post a receive of %u bytes in %d pieces", round->length, wr.num_sge);
	}
	barrier(side->socket);
	if (is_received(round)) {
		struct ibv_wc wc = complete(side, round);
		if (wc.byte_len != round->length)
			fail("%s of %u bytes arrived as %u", NAMES[round->kind], round->length, wc.byte_len);
		if (round->kind != SEND && (!(wc.wc_flags & IBV_WC_WITH_IMM) || ntohl(wc.imm_data) != (uint32_t)round->seed))
			fail("%s came without its immediate value", NAMES[round->kind]);
	}
	barrier(side->socket);
	if (is_atomic(round)) {
		uint64_t found, before = word(round->seed, 0);
		memcpy(&found, side->arena + pieces[0].offset, sizeof(found));
		if (found != (round->kind == FETCH_ADD ? before + 5 : ~before))
			fail("%s left a wrong value", NAMES[round->kind]);
	} else if (!is_source) {
		compare(side, round, 1);
	}
}

static struct round draw(uint64_t *state, uint32_t max_pieces)
{
	struct round round = { .kind = below(state, KINDS), .seed = next(state) };
	// Every order of magnitude alike, with the ends exactly.
	uint32_t choice = below(state, 20);
	round.length = choice == 0 ? 0 : choice == 1 ? LARGEST : below(state, 2u << below(state, 24));
	round.pieces[0] = 1 + below(state, max_pieces);
	// A remote operation names one address; a receive may be scattered.
	round.pieces[1] = round.kind == SEND || round.kind == SEND_IMM ? 1 + below(state, max_pieces) : 1;
	if (is_atomic(&round)) {
		round.length = 8;
		round.pieces[0] = 1;
	}
	return round;
}

static void make_arena(struct side *side)
{
	uint32_t pages = ARENA / PAGE, *order = malloc(pages * sizeof(*order));
	uint64_t state = 42;
	side->arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (side->arena == MAP_FAILED || !order)
		fail("no memory");
	madvise(side->arena, ARENA, MADV_NOHUGEPAGE);
	for (uint32_t i = 0; i < pages; i++)
		order[i] = i;
	for (uint32_t i = pages - 1; i > 0; i--) {
		uint32_t other = below(&state, i + 1), kept = order[i];
		order[i] = order[other];
		order[other] = kept;
	}
	for (uint32_t i = 0; i < pages; i++)
		side->arena[(size_t)order[i] * PAGE] = 1;
	free(order);
}

static uint32_t set_up(struct side *side, const char *name)
{
	side->context = open_device(name);
	struct ibv_device_attr attr;
	if (ibv_query_device(side->context, &attr))
		fail("cannot query %s", name);
	uint32_t pieces = attr.max_sge < MAX_PIECES ? (uint32_t)attr.max_sge : MAX_PIECES;
	make_arena(side);
	side->pd = ibv_alloc_pd(side->context);
	side->mr = ibv_reg_mr(side->pd, side->arena, ARENA, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
			      IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(side->context);
	side->cq = channel ? ibv_create_cq(side->context, 64, NULL, channel, 0) : NULL;
	if (!side->mr || !side->cq)
		fail("cannot create a memory region and a completion queue: %s", strerror(errno));
	struct ibv_qp_init_attr init = {
		.send_cq = side->cq,
		.recv_cq = side->cq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = pieces, .max_recv_sge = pieces },
		.qp_type = IBV_QPT_RC,
	};
	side->qp = ibv_create_qp(side->pd, &init);
	if (!side->qp)
		fail("cannot create a queue pair with %u elements: %s", pieces, strerror(errno));
	side->own = (struct address){ side->qp->qp_num, 0x123456, side->mr->rkey, 0, (uintptr_t)side->arena, { { 0 } } };
	if (ibv_query_gid(side->context, 1, side->gid_index, &side->own.gid))
		fail("there is no GID %d", side->gid_index);
	return pieces;
}

int main(int argc, char **argv)
{
	if (argc < 5)
		fail("usage: %s DEVICE GID-INDEX MEBIBYTES SEED [SERVER]", argv[0]);
	const char *server = argc > 5 ? argv[5] : NULL;
	struct side side = { .gid_index = atoi(argv[2]), .is_client = server != NULL };
	uint64_t wanted = strtoull(argv[3], NULL, 10) << 20, state = strtoull(argv[4], NULL, 10);
	uint32_t pieces = set_up(&side, argv[1]);
	side.socket = control_connection(server, PORT);
	exchange_out(side.socket, &side.own, sizeof(side.own));
	exchange_in(side.socket, &side.peer, sizeof(side.peer));
	struct connection how = {
		.access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
		.timeout = 18,
		.retry_cnt = 7,
		.rnr_retry = 7,
	};
	connect_queue_pair(side.qp, &side.own, &side.peer, side.gid_index, how);
	barrier(side.socket);

	uint64_t moved = 0, rounds[KINDS] = { 0 };
	struct round round = { 0 };
	while (!round.last) {
		if (side.is_client) {
			round = draw(&state, pieces);
			round.last = moved + round.length >= wanted;
			exchange_out(side.socket, &round, sizeof(round));
			client_round(&side, &round);
		} else {
			exchange_in(side.socket, &round, sizeof(round));
			server_round(&side, &round);
		}
		moved += round.length;
		rounds[round.kind]++;
	}
	barrier(side.socket);
	printf("compared %" PRIu64 " bytes:", moved);
	for (int kind = 0; kind < KINDS; kind++)
		printf(" %s %" PRIu64, NAMES[kind], rounds[kind]);
	printf("\n");
	return 0;
}
