// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Sends requests of eight bytes to a queue pair that the command line describes, one after the other, until one fails.
// Each request carries its number, from 1 on, so the peer sees the progress in its memory. The program prints the
// number of its own queue pair, and begins when it gets SIGUSR1.

#include <signal.h>

#include "control.h"

enum { FIRST_PSN = 5, TIMEOUT = 14 };

static struct ibv_qp *create(struct ibv_context *context, struct ibv_pd **pd, struct ibv_cq **cq)
{
	*pd = ibv_alloc_pd(context);
	*cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	if (!*pd || !*cq)
		fail("cannot create a protection domain and a completion queue: %s", strerror(errno));
	struct ibv_qp_init_attr init = {
		.send_cq = *cq,
		.recv_cq = *cq,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(*pd, &init);
	if (!qp)
		fail("cannot create a queue pair: %s", strerror(errno));
	return qp;
}

int main(int argc, char **argv)
{
	if (argc != 9)
		fail("usage: %s DEVICE GID-INDEX send|write RETRIES PEER-GID PEER-QPN RKEY ADDRESS", argv[0]);
	int gid_index = atoi(argv[2]);
	struct ibv_context *context = open_device(argv[1]);
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp = create(context, &pd, &cq);
	static uint64_t number;
	struct ibv_mr *mr = ibv_reg_mr(pd, &number, sizeof(number), IBV_ACCESS_LOCAL_WRITE);
	if (!mr)
		fail("cannot register memory: %s", strerror(errno));
	struct address own = { .psn = FIRST_PSN };
	struct address peer = { .qpn = (uint32_t)strtoul(argv[6], NULL, 0), .psn = FIRST_PSN };
	if (inet_pton(AF_INET6, argv[5], peer.gid.raw) != 1)
		fail("%s is no GID", argv[5]);

	sigset_t begin;
	int signal;
	sigemptyset(&begin);
	sigaddset(&begin, SIGUSR1);
	sigprocmask(SIG_BLOCK, &begin, NULL);
	printf("queue pair %u\n", qp->qp_num);
	fflush(stdout);
	sigwait(&begin, &signal);

	struct connection how = { .timeout = TIMEOUT, .retry_cnt = (uint8_t)atoi(argv[4]), .rnr_retry = 7 };
	connect_queue_pair(qp, &own, &peer, gid_index, how);
	struct ibv_sge sge = { (uintptr_t)&number, sizeof(number), mr->lkey };
	struct ibv_send_wr *bad, request = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = strcmp(argv[3], "send") ? IBV_WR_RDMA_WRITE : IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .rkey = (uint32_t)strtoul(argv[7], NULL, 0), .remote_addr = strtoull(argv[8], NULL, 0) },
	};
	struct ibv_wc completion = { .status = IBV_WC_SUCCESS };
	while (completion.status == IBV_WC_SUCCESS) {
		number++;
		if (ibv_post_send(qp, &request, &bad))
			fail("cannot post a request");
		int count;
		while ((count = ibv_poll_cq(cq, 1, &completion)) == 0)
			usleep(100);
		if (count < 0)
			fail("cannot poll the completion queue");
		usleep(1000);
	}
	printf("request %llu: %s\n", (unsigned long long)number, ibv_wc_status_str(completion.status));
	return 0;
}
