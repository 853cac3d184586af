// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Shared code of the programs for guests: errors, the TCP connection that keeps both sides in step, and the states of a
// connected queue pair.

#ifndef CONTROL_H
#define CONTROL_H

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// Address of a queue pair and of its memory, for the peer.
struct address {
	uint32_t qpn, psn, rkey, pad;
	uint64_t base;
	union ibv_gid gid;
};

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

static void fail(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, "\n");
	exit(1);
}

static inline void exchange_out(int fd, const void *data, size_t length)
{
	if (write(fd, data, length) != (ssize_t)length)
		fail("the control connection broke (write): %s", strerror(errno));
}

static inline void exchange_in(int fd, void *data, size_t length)
{
	if (recv(fd, data, length, MSG_WAITALL) != (ssize_t)length)
		fail("the control connection broke (read): the other side has ended");
}

// Returns when both sides have called it.
static inline void barrier(int fd)
{
	char byte = 0;
	exchange_out(fd, &byte, 1);
	exchange_in(fd, &byte, 1);
}

// Listens, or connects to `server`.
static inline int control_connection(const char *server, uint16_t port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	if (server) {
		if (inet_pton(AF_INET, server, &address.sin_addr) != 1 ||
		    connect(fd, (struct sockaddr *)&address, sizeof(address)))
			fail("cannot connect to %s: %s", server, strerror(errno));
		return fd;
	}
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) || listen(fd, 1))
		fail("cannot listen: %s", strerror(errno));
	fd = accept(fd, NULL, NULL);
	if (fd < 0)
		fail("cannot accept: %s", strerror(errno));
	return fd;
}

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;
	for (int i = 0; list && list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			context = ibv_open_device(list[i]);
	if (!context)
		fail("cannot open %s", name);
	return context;
}

// Parameters of a connection.
struct connection {
	unsigned access;
	uint8_t timeout, retry_cnt, rnr_retry;
	// The queue pair stays in RTR.
	int receives_only;
};

// Moves a queue pair from RESET to RTS.
static inline void connect_queue_pair(struct ibv_qp *qp, const struct address *own, const struct address *peer,
				      int gid_index, struct connection how)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = how.access };
	struct ibv_qp_attr ready = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer->qpn,
		.rq_psn = peer->psn,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = peer->gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64 } },
	};
	struct ibv_qp_attr send = {
		.qp_state = IBV_QPS_RTS,
		.timeout = how.timeout,
		.retry_cnt = how.retry_cnt,
		.rnr_retry = how.rnr_retry,
		.sq_psn = own->psn,
		.max_rd_atomic = 1,
	};
	if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
	    ibv_modify_qp(qp, &ready, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) ||
	    (!how.receives_only &&
	     ibv_modify_qp(qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			   IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)))
		fail("cannot connect the queue pair: %s", strerror(errno));
}

#endif
