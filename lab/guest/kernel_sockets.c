// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Sockets that the kernel carries over RDMA: SMC-R (a stream) and RDS (datagrams). One side listens, the other connects.
// Both send the same amount at once, and compare every byte of what comes.

#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/smc_diag.h>
#include <linux/sock_diag.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// From linux/socket.h and linux/rds.h, which not every C library has.
enum { FAMILY_RDS = 21, FAMILY_SMC = 43, SOL_RDS_ = 276, SEND_MESSAGES = 10003, RETRANSMIT_MESSAGES = 10004 };
enum { PORT = 7001, TOTAL = 8000000, DATAGRAM = 8000 };

static uint8_t data[TOTAL], came[TOTAL];

static void fill(uint8_t *bytes, unsigned seed)
{
	for (size_t i = 0; i < TOTAL; i++)
		bytes[i] = seed * 151 + i * 7 + (i >> 8) * 13 + (i >> 16);
}

static struct sockaddr_in address(const char *text)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(PORT) };

	if (inet_pton(AF_INET, text, &address.sin_addr) != 1)
		errx(1, "%s is not an address", text);
	return address;
}

// Sends and receives as both become possible, in pieces of at most so many bytes.
static void exchange(int socket, size_t piece, const struct sockaddr_in *peer)
{
	size_t sent = 0, received = 0;

	while (sent < TOTAL || received < TOTAL) {
		struct pollfd poll_for = { .fd = socket, .events = POLLIN | (sent < TOTAL ? POLLOUT : 0) };

		if (poll(&poll_for, 1, 60000) < 1)
			errx(1, "nothing moves any more: %zu sent, %zu received", sent, received);
		if (poll_for.revents & POLLIN) {
			ssize_t n = recv(socket, came + received, TOTAL - received, MSG_DONTWAIT);

			if (n == 0)
				errx(1, "the other side has closed after %zu bytes", received);
			if (n < 0 && errno != EAGAIN)
				err(1, "recv");
			received += n > 0 ? n : 0;
		}
		if (sent < TOTAL && (poll_for.revents & POLLOUT)) {
			size_t size = TOTAL - sent < piece ? TOTAL - sent : piece;
			ssize_t n = sendto(socket, data + sent, size, MSG_DONTWAIT, (const void *)peer,
					   peer ? sizeof(*peer) : 0);

			if (n < 0 && errno != EAGAIN && errno != ENOBUFS)
				err(1, "send");
			sent += n > 0 ? n : 0;
		}
	}
}

static int stream(int listens, const char *own, const char *other)
{
	struct sockaddr_in here = address(own), there = address(other);
	int on = 1, connected, socket_ = socket(FAMILY_SMC, SOCK_STREAM, 0);

	if (socket_ < 0)
		err(1, "socket");
	setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (!listens) {
		if (connect(socket_, (void *)&there, sizeof(there)))
			err(1, "connect");
		return socket_;
	}
	if (bind(socket_, (void *)&here, sizeof(here)) || listen(socket_, 1))
		err(1, "listen");
	connected = accept(socket_, NULL, NULL);
	if (connected < 0)
		err(1, "accept");
	return connected;
}

static int datagrams(const char *own)
{
	struct sockaddr_in here = address(own);
	int socket_ = socket(FAMILY_RDS, SOCK_SEQPACKET, 0);

	if (socket_ < 0 || bind(socket_, (void *)&here, sizeof(here)))
		err(1, "rds");
	return socket_;
}

// Reason for which a connection fell back to TCP (SMC_CLC_DECL in the kernel).
static unsigned reason(struct nlmsghdr *header)
{
	struct rtattr *attribute = (void *)((char *)NLMSG_DATA(header) + NLMSG_ALIGN(sizeof(struct smc_diag_msg)));
	int size = header->nlmsg_len - NLMSG_LENGTH(sizeof(struct smc_diag_msg));

	for (; RTA_OK(attribute, size); attribute = RTA_NEXT(attribute, size))
		if (attribute->rta_type == SMC_DIAG_FALLBACK)
			return ((struct smc_diag_fallback *)RTA_DATA(attribute))->reason;
	return 0;
}

// SMC falls back to TCP by itself, and says so only when it is asked.
static void no_fallback(void)
{
	enum { ACTIVE = 1 };
	struct {
		struct nlmsghdr header;
		struct smc_diag_req body;
	} request = {
		.header = { .nlmsg_len = sizeof(request), .nlmsg_type = SOCK_DIAG_BY_FAMILY,
			    .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP },
		.body = { .diag_family = FAMILY_SMC, .diag_ext = 1 << (SMC_DIAG_FALLBACK - 1) },
	};
	static char answer[1 << 16] __attribute__((aligned(NLMSG_ALIGNTO)));
	int active = 0, diagnosis = socket(AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG);
	ssize_t size;

	if (diagnosis < 0 || send(diagnosis, &request, sizeof(request), 0) < 0)
		err(1, "smc_diag");
	size = recv(diagnosis, answer, sizeof(answer), 0);
	if (size < 0)
		err(1, "smc_diag");
	for (struct nlmsghdr *header = (void *)answer; NLMSG_OK(header, size); header = NLMSG_NEXT(header, size)) {
		struct smc_diag_msg *found = NLMSG_DATA(header);

		if (header->nlmsg_type != SOCK_DIAG_BY_FAMILY || found->diag_state != ACTIVE)
			continue;
		if (found->diag_mode != SMC_DIAG_MODE_SMCR)
			errx(1, "a connection is not RDMA, for the reason 0x%x", reason(header));
		active++;
	}
	if (!active)
		errx(1, "no connection is active");
	close(diagnosis);
}

// Datagrams that were not acknowledged are gone with their socket.
static void acknowledged(int socket)
{
	static char messages[1 << 20];

	for (int what = SEND_MESSAGES; what <= RETRANSMIT_MESSAGES; what++) {
		socklen_t size;

		do {
			usleep(10000);
			size = sizeof(messages);
			if (getsockopt(socket, SOL_RDS_, what, messages, &size) < 0)
				err(1, "getsockopt");
		} while (size);
	}
}

int main(int argc, char **argv)
{
	int listens, is_stream;

	if (argc != 5)
		errx(2, "usage: kernel_sockets smc|rds listen|connect OWN-ADDRESS OTHER-ADDRESS");
	is_stream = !strcmp(argv[1], "smc");
	listens = !strcmp(argv[2], "listen");
	struct sockaddr_in peer = address(argv[4]);
	int socket_ = is_stream ? stream(listens, argv[3], argv[4]) : datagrams(argv[3]);

	if (is_stream)
		no_fallback();
	fill(data, listens);
	exchange(socket_, is_stream ? TOTAL : DATAGRAM, is_stream ? NULL : &peer);
	fill(data, !listens);
	if (memcmp(data, came, TOTAL))
		errx(1, "other bytes came than were sent");
	printf("%d bytes compared\n", TOTAL);
	fflush(stdout);
	if (!is_stream)
		acknowledged(socket_);
	return 0;
}
