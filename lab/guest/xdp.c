// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Attaches an XDP program to an interface, in its driver, for as long as this program runs: `xdp eth0`.
//
// Datagrams of UDP over IPv4 to the discard port go back to where they came from, with their Ethernet addresses
// swapped. Everything else passes.

#include <arpa/inet.h>
#include <err.h>
#include <linux/bpf.h>
#include <linux/if_link.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { DISCARD = 9, ETHERTYPE = 12, PROTOCOL = 14 + 9, DESTINATION_PORT = 14 + 20 + 2, HEADERS = 14 + 20 + 8 };

#define INSN(op, dst, src, offset, immediate) \
	{ .code = (op), .dst_reg = (dst), .src_reg = (src), .off = (offset), .imm = (immediate) }
#define LOAD(size, dst, src, offset) INSN(BPF_LDX | BPF_MEM | (size), dst, src, offset, 0)
#define STORE(size, dst, offset, src) INSN(BPF_STX | BPF_MEM | (size), dst, src, offset, 0)
#define SET(dst, value) INSN(BPF_ALU64 | BPF_MOV | BPF_K, dst, 0, 0, value)
#define UNLESS(dst, value, instructions) INSN(BPF_JMP | BPF_JNE | BPF_K, dst, 0, instructions, value)
#define EXIT INSN(BPF_JMP | BPF_EXIT, 0, 0, 0, 0)
// Both halves of the two addresses that are this many bytes from their beginning.
#define SWAP(offset) \
	LOAD(BPF_H, 4, 2, offset), LOAD(BPF_H, 5, 2, 6 + (offset)), STORE(BPF_H, 2, offset, 5), \
		STORE(BPF_H, 2, 6 + (offset), 4)

static long bpf(int command, union bpf_attr *attributes)
{
	return syscall(SYS_bpf, command, attributes, sizeof(*attributes));
}

int main(int argc, char **argv)
{
	const struct bpf_insn program[] = {
		LOAD(BPF_W, 2, 1, offsetof(struct xdp_md, data)),
		LOAD(BPF_W, 3, 1, offsetof(struct xdp_md, data_end)),
		INSN(BPF_ALU64 | BPF_MOV | BPF_X, 4, 2, 0, 0),
		INSN(BPF_ALU64 | BPF_ADD | BPF_K, 4, 0, 0, HEADERS),
		INSN(BPF_JMP | BPF_JGT | BPF_X, 4, 3, 20, 0),
		LOAD(BPF_H, 5, 2, ETHERTYPE),
		UNLESS(5, htons(0x0800), 18),
		LOAD(BPF_B, 5, 2, PROTOCOL),
		UNLESS(5, IPPROTO_UDP, 16),
		LOAD(BPF_H, 5, 2, DESTINATION_PORT),
		UNLESS(5, htons(DISCARD), 14),
		SWAP(0),
		SWAP(2),
		SWAP(4),
		SET(0, XDP_TX),
		EXIT,
		SET(0, XDP_PASS),
		EXIT,
	};
	static char messages[1 << 16];
	union bpf_attr attributes = {
		.prog_type = BPF_PROG_TYPE_XDP,
		.insns = (uintptr_t)program,
		.insn_cnt = sizeof(program) / sizeof(program[0]),
		.license = (uintptr_t)"Dual BSD/GPL",
		.log_level = 1,
		.log_size = sizeof(messages),
		.log_buf = (uintptr_t)messages,
	};
	if (argc != 2)
		errx(1, "usage: xdp INTERFACE");
	long loaded = bpf(BPF_PROG_LOAD, &attributes);
	if (loaded < 0)
		err(1, "cannot load the program: %s", messages);
	attributes = (union bpf_attr){ .link_create = {
		.prog_fd = (uint32_t)loaded,
		.target_ifindex = if_nametoindex(argv[1]),
		.attach_type = BPF_XDP,
		.flags = XDP_FLAGS_DRV_MODE,
	} };
	if (bpf(BPF_LINK_CREATE, &attributes) < 0)
		err(1, "cannot attach the program");
	printf("attached\n");
	fflush(stdout);
	for (;;)
		pause();
}
