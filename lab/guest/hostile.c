// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// A hostile process, which must harm only itself.
//
// It has lives, each in a process of its own, whose random numbers follow from the seed and the number of the life. In
// a life it creates queue pairs, queues and regions as any program does, and then stores anything into what the library has
// mapped for it (rings, their indices, the doorbell page), posts requests with keys, addresses and lengths that are not
// its own, connects to queue pairs of others and as others, changes and destroys what it has, and ends: with or without
// cleaning up, or because its own library stumbles over its rings. It ends when there is a file CALM.
//
// The victims, GID,QPN,HANDLE,KEY,ADDRESS,LENGTH each, are what it knows of others, of this guest and of another one.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

// It communicates with no other program.
#pragma GCC diagnostic ignored "-Wunused-function"
#include "control.h"

enum { PAGE = 4096, BUFFER = 256 << 10, PAIRS = 6, QUEUES = 3, REGIONS = 6, VICTIMS = 16, AREAS = 64, MAPS = 512 };
// Of a life: most steps, and after how many seconds it is killed (a library that reads rings of garbage may not return).
enum { STEPS = 500, LIFE = 10 };

static const char CALM[] = "/run/hostile/calm";

struct victim {
	union ibv_gid gid;
	uint32_t qpn, handle, key;
	uint64_t address, length;
};

// Memory that is the library's: rings, or doorbells.
struct area {
	uint8_t *start;
	size_t length;
};

struct maps {
	struct area areas[MAPS];
	int count;
};

static struct victim victims[VICTIMS];
static int victim_count;
static uint64_t state;

static struct ibv_context *context;
static union ibv_gid own_gid;
static int gid_index;
static struct ibv_pd *pds[2];
static struct ibv_cq *queues[QUEUES];
static struct ibv_qp *pairs[PAIRS];
static struct ibv_mr *regions[REGIONS];
static uint8_t *buffer;
static struct area rings[AREAS], doorbells[AREAS];
static int ring_count, doorbell_count;

static uint64_t next(void)
{
	uint64_t z = (state += 0x9e3779b97f4a7c15);
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
	return z ^ (z >> 31);
}

static uint32_t below(uint32_t limit)
{
	return (uint32_t)(next() % limit);
}

// A number of the kind that handles, sizes, indices and masks are made of.
static uint32_t number(void)
{
	switch (below(8)) {
	case 4:
		return 1u << below(32);
	case 5:
		return (1u << below(32)) - 1;
	case 6:
		return below(0x200);
	case 7:
		return (uint32_t)next();
	default:
		return below(8);
	}
}

static const struct victim *victim(void)
{
	return &victims[below((uint32_t)victim_count)];
}

// Writable mappings: areas without a name, or those of the device.
static void look(struct maps *maps, int of_device)
{
	FILE *file = fopen("/proc/self/maps", "r");
	char line[512], rights[8], name[400];
	unsigned long start, end;
	if (!file)
		fail("cannot read its maps");
	maps->count = 0;
	while (fgets(line, sizeof(line), file) && maps->count < MAPS) {
		name[0] = 0;
		if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %399s", &start, &end, rights, name) < 3 || rights[1] != 'w')
			continue;
		if (of_device ? strstr(name, "uverbs") != NULL : name[0] == 0)
			maps->areas[maps->count++] = (struct area){ (uint8_t *)start, end - start };
	}
	fclose(file);
}

static int is_mapped(const struct maps *maps, const uint8_t *page)
{
	for (int i = 0; i < maps->count; i++)
		if (page >= maps->areas[i].start && page < maps->areas[i].start + maps->areas[i].length)
			return 1;
	return 0;
}

// Remembers what has come since `before`, page by page: neighbours are shown as one.
static void remember(const struct maps *before, int of_device, struct area *areas, int *count)
{
	static struct maps now;
	look(&now, of_device);
	for (int i = 0; i < now.count; i++) {
		uint8_t *end = now.areas[i].start + now.areas[i].length, *page = now.areas[i].start;
		while (page < end) {
			uint8_t *start = page;
			while (page < end && !is_mapped(before, page))
				page += PAGE;
			if (page > start && *count < AREAS)
				areas[(*count)++] = (struct area){ start, (size_t)(page - start) };
			page += page == start ? PAGE : 0;
		}
	}
}

static void create_queue(int at)
{
	static struct maps before;
	look(&before, 0);
	queues[at] = ibv_create_cq(context, 16 + (int)below(200), NULL, NULL, 0);
	remember(&before, 0, rings, &ring_count);
}

static struct ibv_cq *any_queue(void)
{
	return queues[below(QUEUES)];
}

static void connect_to(struct ibv_qp *qp, const union ibv_gid *gid, uint32_t qpn)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	ibv_modify_qp(qp, &attr, IBV_QP_STATE);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = number(),
				     .qp_access_flags = below(4) ? 15 : number() & 15 };
	int datagrams = qp->qp_type == IBV_QPT_UD;
	ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		      (datagrams ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = 1 + below(5),
		.dest_qp_num = qpn,
		// That of the programs that compare, often.
		.rq_psn = below(3) ? 0x123456 : (uint32_t)next() & 0xffffff,
		.max_dest_rd_atomic = (uint8_t)(1 + below(4)),
		.min_rnr_timer = (uint8_t)below(32),
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = *gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64 } },
	};
	ibv_modify_qp(qp, &attr, datagrams ? IBV_QP_STATE : IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
		      IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = (uint8_t)below(15), .retry_cnt = (uint8_t)below(8),
				     .rnr_retry = (uint8_t)below(8), .sq_psn = 0x123456, .max_rd_atomic = 4 };
	ibv_modify_qp(qp, &attr, datagrams ? IBV_QP_STATE | IBV_QP_SQ_PSN : IBV_QP_STATE | IBV_QP_TIMEOUT |
		      IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static void create_pair(int at)
{
	static struct maps before;
	struct ibv_qp_init_attr init = {
		.send_cq = any_queue(),
		.recv_cq = any_queue(),
		.cap = { .max_send_wr = 1 + below(64), .max_recv_wr = 1 + below(64), .max_send_sge = 4, .max_recv_sge = 4 },
		.qp_type = below(4) ? IBV_QPT_RC : IBV_QPT_UD,
	};
	if (!init.send_cq || !init.recv_cq || !(pds[0] && pds[1]))
		return;
	look(&before, 0);
	pairs[at] = ibv_create_qp(pds[below(2)], &init);
	remember(&before, 0, rings, &ring_count);
	if (pairs[at])
		connect_to(pairs[at], &own_gid, pairs[at]->qp_num);
}

// A life begins as that of any other process.
static void begin(const char *device)
{
	static struct maps before;
	look(&before, 1);
	context = open_device(device);
	remember(&before, 1, doorbells, &doorbell_count);
	if (ibv_query_gid(context, 1, gid_index, &own_gid))
		fail("there is no GID %d", gid_index);
	buffer = aligned_alloc(PAGE, BUFFER);
	if (!buffer)
		fail("no memory");
	memset(buffer, 0x66, BUFFER);
	for (int i = 0; i < 2; i++)
		pds[i] = ibv_alloc_pd(context);
	for (int i = 0; i < QUEUES; i++)
		create_queue(i);
	regions[0] = pds[0] ? ibv_reg_mr(pds[0], buffer, BUFFER, 15) : NULL;
	if (!pds[0] || !pds[1] || !queues[0] || !regions[0])
		fail("cannot begin: %s", strerror(errno));
	for (int i = 0; i < PAIRS / 2; i++)
		create_pair(i);
}

// A word into a ring or its indices.
static void scribble(void)
{
	const struct area *area = &rings[below((uint32_t)ring_count)];
	// Indices are in front.
	size_t at = below(2) ? below(16) : below((uint32_t)(area->length / 4));
	((volatile uint32_t *)area->start)[at] = number();
}

static void ring(void)
{
	if (doorbell_count == 0)
		return;
	const struct area *area = &doorbells[below((uint32_t)doorbell_count)];
	uint32_t handle = below(3) ? number() : victim()->handle;
	uint32_t at = below(4) ? below(5) : below((uint32_t)(area->length / 4));
	((volatile uint32_t *)area->start)[at] = (handle & 0xffffff) | (uint32_t)next() << 24;
}

static struct ibv_qp *any_pair(void)
{
	return pairs[below(PAIRS)];
}

static void modify(void)
{
	struct ibv_qp *qp = any_pair();
	if (!qp)
		return;
	struct ibv_qp_attr attr = { .qp_state = (enum ibv_qp_state)below(8), .dest_qp_num = victim()->qpn,
				    .rq_psn = number(), .sq_psn = number(), .qkey = number(), .timeout = (uint8_t)number() };
	switch (below(4)) {
	case 0:
		ibv_modify_qp(qp, &attr, IBV_QP_STATE);
		break;
	case 1:
		ibv_modify_qp(qp, &attr, (int)(number() & 0x1fffff));
		break;
	case 2:
		connect_to(qp, &victim()->gid, victim()->qpn);
		break;
	default:
		connect_to(qp, &own_gid, any_pair() ? qp->qp_num : victim()->qpn);
	}
}

static uint32_t any_length(void)
{
	return below(8) ? below(64 << 10) : number();
}

static struct ibv_sge own_piece(void)
{
	return (struct ibv_sge){ (uintptr_t)buffer + below(BUFFER / 2), below(BUFFER / 2), regions[0]->lkey };
}

static struct ibv_sge piece(void)
{
	const struct victim *of = victim();
	if (below(2))
		return own_piece();
	uint64_t address = of->address + next() % (of->length + 1);
	return (struct ibv_sge){ below(8) ? address : next(), any_length(), below(8) ? of->key : number() };
}

// A request that may be right but for its keys, over a connection to itself that is made anew, as most end it.
static void post(void)
{
	static const enum ibv_wr_opcode OPCODES[] = { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND,
						      IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_RDMA_WRITE_WITH_IMM };
	struct ibv_qp *qp = any_pair();
	const struct victim *of = victim();
	if (!qp)
		return;
	if (below(3))
		connect_to(qp, &own_gid, qp->qp_num);
	struct ibv_sge list[4];
	struct ibv_send_wr *bad, wr = { .wr_id = next(), .sg_list = list, .num_sge = 1, .opcode = OPCODES[below(5)],
					.send_flags = number() & 15 };
	uint64_t address = of->address + next() % (of->length + 1);
	// Others' memory at one end only, often: with two mistakes only the first one counts.
	int lawful = (int)below(2);
	list[0] = lawful ? own_piece() : piece();
	if (!lawful)
		for (wr.num_sge = 0; wr.num_sge < (int)(1 + below(4)) && wr.num_sge < 4; wr.num_sge++)
			list[wr.num_sge] = piece();
	if (qp->qp_type == IBV_QPT_UD)
		return;
	if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		list[0].length = 8;
		wr.wr.atomic.remote_addr = address & ~7ull;
		wr.wr.atomic.compare_add = next();
		wr.wr.atomic.rkey = of->key;
	} else {
		wr.wr.rdma.remote_addr = address;
		wr.wr.rdma.rkey = below(8) ? of->key : number();
		if (!lawful && below(2)) {
			wr.wr.rdma.remote_addr = (uintptr_t)buffer;
			wr.wr.rdma.rkey = regions[0]->rkey;
		}
	}
	struct ibv_recv_wr *bad_receive, receive = { .wr_id = next(), .sg_list = list, .num_sge = 1 };
	struct ibv_sge target = list[0];
	if (below(2)) {
		list[0] = piece();
		ibv_post_recv(qp, &receive, &bad_receive);
		list[0] = target;
	}
	ibv_post_send(qp, &wr, &bad);
}

static void poll_all(void)
{
	struct ibv_wc wc[16];
	struct ibv_cq *cq = any_queue();
	if (cq) {
		ibv_poll_cq(cq, 16, wc);
		ibv_req_notify_cq(cq, (int)below(2));
	}
}

static void register_region(void)
{
	int at = 1 + (int)below(REGIONS - 1);
	if (regions[at]) {
		ibv_dereg_mr(regions[at]);
		regions[at] = NULL;
		return;
	}
	size_t offset = below(BUFFER - PAGE), length = 1 + below((uint32_t)(BUFFER - offset));
	regions[at] = ibv_reg_mr(pds[below(2)], buffer + offset, length, (int)(number() & 15));
}

static void replace(void)
{
	int at = (int)below(PAIRS);
	// Its rings are gone with it, so that nothing may be stored there. New ones come while there is room.
	if (!pairs[at] && ring_count < AREAS / 2)
		create_pair(at);
}

static void clean_up(void)
{
	for (int i = 0; i < PAIRS; i++)
		if (pairs[i])
			ibv_destroy_qp(pairs[i]);
	for (int i = 0; i < QUEUES; i++)
		if (queues[i])
			ibv_destroy_cq(queues[i]);
	for (int i = 0; i < REGIONS; i++)
		if (regions[i])
			ibv_dereg_mr(regions[i]);
	for (int i = 0; i < 2; i++)
		ibv_dealloc_pd(pds[i]);
	ibv_close_device(context);
}

static void live(const char *device)
{
	alarm(LIFE);
	begin(device);
	uint32_t steps = below(STEPS);
	for (uint32_t step = 0; step < steps && access(CALM, F_OK); step++) {
		switch (below(32)) {
		case 0:
			replace();
			break;
		case 1:
			register_region();
			break;
		case 2:
		case 3:
			modify();
			break;
		case 4:
		case 5:
		case 6:
			poll_all();
			break;
		case 7:
		case 8:
		case 9:
		case 10:
			ring();
			break;
		case 11:
		case 12:
			scribble();
			break;
		default:
			post();
		}
	}
	if (below(2))
		clean_up();
	_exit(0);
}

static void read_victim(const char *text)
{
	struct victim *to = &victims[victim_count];
	char gid[64];
	unsigned long long address, length;
	if (victim_count == VICTIMS || sscanf(text, "%63[^,],%u,%u,%u,%llu,%llu", gid, &to->qpn, &to->handle, &to->key,
					      &address, &length) != 6 || inet_pton(AF_INET6, gid, &to->gid) != 1)
		fail("no victim: %s", text);
	to->address = address;
	to->length = length;
	victim_count++;
}

int main(int argc, char **argv)
{
	if (argc < 5)
		fail("usage: %s DEVICE GID-INDEX SEED VICTIM...", argv[0]);
	gid_index = atoi(argv[2]);
	uint64_t seed = strtoull(argv[3], NULL, 10), lives = 0, ended = 0;
	for (int i = 4; i < argc; i++)
		read_victim(argv[i]);
	for (; access(CALM, F_OK); lives++) {
		pid_t parent = getpid(), child = fork();
		if (child < 0)
			fail("cannot fork: %s", strerror(errno));
		if (child == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (getppid() != parent)
				_exit(1);
			state = seed << 20 ^ lives;
			live(argv[1]);
		}
		int status;
		if (waitpid(child, &status, 0) != child)
			fail("cannot wait: %s", strerror(errno));
		if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
			fail("life %llu did not begin", (unsigned long long)lives);
		ended += WIFSIGNALED(status);
	}
	printf("lived %llu times, %llu ended early\n", (unsigned long long)lives, (unsigned long long)ended);
	return 0;
}
