// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Datagrams to a group: a member that waits for them, a sender, and what becomes of a queue pair that wants to be a
// member where the driver has no groups.
//
//   multicast member DEVICE GID_INDEX GROUP INTERFACE  waits for a sender and checks what comes
//   multicast sender DEVICE GID_INDEX GROUP SERVER     sends to the group
//   multicast attach DEVICE GID_INDEX GROUP            prints the error

#define _GNU_SOURCE

#include <net/if.h>
#include <poll.h>

#include "control.h"

enum { PORT = 18602, SIZE = 1000, HEADER = 40, COUNT = 8, QKEY = 0x11111111, ALL_MEMBERS = 0xffffff };
enum { PATIENCE_MS = 30000 };

struct side {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint8_t buffer[COUNT][HEADER + SIZE];
};

static uint8_t octet(int datagram, int at)
{
	return (uint8_t)(datagram * 37 + at);
}

static void create(struct side *side, struct ibv_context *context)
{
	side->pd = ibv_alloc_pd(context);
	side->channel = ibv_create_comp_channel(context);
	if (!side->pd || !side->channel)
		fail("cannot create a protection domain and a channel: %s", strerror(errno));
	side->cq = ibv_create_cq(context, 2 * COUNT, NULL, side->channel, 0);
	side->mr = ibv_reg_mr(side->pd, side->buffer, sizeof(side->buffer), IBV_ACCESS_LOCAL_WRITE);
	if (!side->cq || !side->mr)
		fail("cannot create a queue and a region: %s", strerror(errno));
	struct ibv_qp_init_attr init = {
		.send_cq = side->cq,
		.recv_cq = side->cq,
		.cap = { .max_send_wr = COUNT, .max_recv_wr = COUNT, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UD,
	};
	if (!(side->qp = ibv_create_qp(side->pd, &init)))
		fail("cannot create a queue pair: %s", strerror(errno));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	if (ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY))
		fail("INIT: %s", strerror(errno));
	attr.qp_state = IBV_QPS_RTR;
	if (ibv_modify_qp(side->qp, &attr, IBV_QP_STATE))
		fail("RTR: %s", strerror(errno));
	attr.qp_state = IBV_QPS_RTS;
	if (ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN))
		fail("RTS: %s", strerror(errno));
	if (ibv_req_notify_cq(side->cq, 0))
		fail("cannot arm the queue: %s", strerror(errno));
}

// Waits for a completion without an error.
static struct ibv_wc completion(struct side *side)
{
	struct ibv_wc wc;
	for (;;) {
		int count = ibv_poll_cq(side->cq, 1, &wc);
		if (count < 0)
			fail("cannot poll");
		if (count && wc.status != IBV_WC_SUCCESS)
			fail("a completion with %s", ibv_wc_status_str(wc.status));
		if (count)
			return wc;
		struct pollfd ready = { .fd = side->channel->fd, .events = POLLIN };
		if (poll(&ready, 1, PATIENCE_MS) <= 0)
			fail("nothing comes");
		struct ibv_cq *cq;
		void *unused;
		if (ibv_get_cq_event(side->channel, &cq, &unused) || ibv_req_notify_cq(side->cq, 0))
			fail("cannot wait: %s", strerror(errno));
		ibv_ack_cq_events(cq, 1);
	}
}

// The host's IP layer takes datagrams of the group. rdma_rxe in Linux 6.12 sees to its Ethernet address only.
static void join(const union ibv_gid *group, const char *interface)
{
	struct ipv6_mreq request = { .ipv6mr_interface = if_nametoindex(interface) };
	memcpy(&request.ipv6mr_multiaddr, group, sizeof(*group));
	int fd = socket(AF_INET6, SOCK_DGRAM, 0);
	if (fd < 0 || setsockopt(fd, IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, &request, sizeof(request)))
		fail("%s cannot join: %s", interface, strerror(errno));
}

static void be_member(struct side *side, const union ibv_gid *group, const char *interface)
{
	join(group, interface);
	for (int i = 0; i < COUNT; i++) {
		struct ibv_sge sge = { (uintptr_t)side->buffer[i], sizeof(side->buffer[i]), side->mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1 }, *bad;
		if (ibv_post_recv(side->qp, &wr, &bad))
			fail("cannot post a receive");
	}
	if (ibv_attach_mcast(side->qp, group, 0))
		fail("cannot become a member: %s", strerror(errno));
	int control = control_connection(NULL, PORT);
	barrier(control);
	for (int i = 0; i < COUNT; i++) {
		struct ibv_wc wc = completion(side);
		if (wc.wr_id != (uint64_t)i || wc.byte_len != HEADER + SIZE)
			fail("receive %d has %u octets, not the next with %d", (int)wc.wr_id, wc.byte_len, HEADER + SIZE);
		for (int at = 0; at < SIZE; at++)
			if (side->buffer[i][HEADER + at] != octet(i, at))
				fail("octet %d of datagram %d is another", at, i);
	}
	barrier(control);
	printf("%d datagrams came to the group\n", COUNT);
}

static void be_sender(struct side *side, int gid_index, const union ibv_gid *group, const char *server)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
				    .grh = { .dgid = *group, .sgid_index = (uint8_t)gid_index, .hop_limit = 1 } };
	struct ibv_ah *ah = ibv_create_ah(side->pd, &attr);
	if (!ah)
		fail("there is no address handle for a group: %s", strerror(errno));
	int control = control_connection(server, PORT);
	barrier(control);
	for (int i = 0; i < COUNT; i++) {
		for (int at = 0; at < SIZE; at++)
			side->buffer[i][at] = octet(i, at);
		struct ibv_sge sge = { (uintptr_t)side->buffer[i], SIZE, side->mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					  .send_flags = IBV_SEND_SIGNALED,
					  .wr.ud = { .ah = ah, .remote_qpn = ALL_MEMBERS, .remote_qkey = QKEY } }, *bad;
		if (ibv_post_send(side->qp, &wr, &bad))
			fail("cannot post a send");
		completion(side);
	}
	barrier(control);
	printf("%d datagrams left for the group\n", COUNT);
}

static void try_to_attach(struct side *side, const union ibv_gid *group)
{
	errno = 0;
	int error = ibv_attach_mcast(side->qp, group, 0);
	if (!error)
		fail("the queue pair is a member now");
	printf("attach_mcast: %s\n", strerrorname_np(error > 0 ? error : errno));
}

int main(int argc, char **argv)
{
	static struct side side;
	union ibv_gid group;
	if (argc < 5 || inet_pton(AF_INET6, argv[4], &group) != 1)
		fail("usage: multicast member|sender|attach DEVICE GID_INDEX GROUP [INTERFACE|SERVER]");
	create(&side, open_device(argv[2]));
	if (!strcmp(argv[1], "attach"))
		try_to_attach(&side, &group);
	else if (argc < 6)
		fail("a member needs an interface, a sender a server");
	else if (!strcmp(argv[1], "member"))
		be_member(&side, &group, argv[5]);
	else
		be_sender(&side, atoi(argv[3]), &group, argv[5]);
	return 0;
}
