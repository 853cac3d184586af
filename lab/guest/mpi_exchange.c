// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// Two ranks exchange messages of all sizes with MPI and compare every byte: what is sent and received, what is put into
// and got from the other rank's memory, what is added there, and what a broadcast and a reduction give.

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST = 1 << 22, WINDOW = 16 };

static int rank;
static long compared;

static void fail(const char *what, long where)
{
	fprintf(stderr, "rank %d: %s: wrong at %ld\n", rank, what, where);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

static uint8_t expected(int seed, long i)
{
	return (uint8_t)(seed * 151 + i * 7 + (i >> 8) * 13 + (i >> 16));
}

static void fill(uint8_t *data, long size, int seed)
{
	for (long i = 0; i < size; i++)
		data[i] = expected(seed, i);
}

static void compare(const char *what, const uint8_t *data, long size, int seed)
{
	for (long i = 0; i < size; i++)
		if (data[i] != expected(seed, i))
			fail(what, i);
	compared += size;
}

// Both ways at once, with several messages on their way.
static void send_and_receive(uint8_t *out, uint8_t *in)
{
	for (long size = 0; size <= LARGEST; size = size ? size * 4 : 1) {
		int messages = size > 1 << 16 ? 2 : WINDOW;
		MPI_Request requests[2 * WINDOW];

		if (size * messages > LARGEST)
			messages = 1;
		memset(in, 0, size * messages);
		for (int m = 0; m < messages; m++) {
			fill(out + m * size, size, rank + 2 * m);
			MPI_Irecv(in + m * size, size, MPI_BYTE, 1 - rank, m, MPI_COMM_WORLD, &requests[2 * m]);
			MPI_Isend(out + m * size, size, MPI_BYTE, 1 - rank, m, MPI_COMM_WORLD, &requests[2 * m + 1]);
		}
		MPI_Waitall(2 * messages, requests, MPI_STATUSES_IGNORE);
		for (int m = 0; m < messages; m++)
			compare("message", in + m * size, size, 1 - rank + 2 * m);
	}
}

// Into and out of the other's memory.
static void put_and_get(uint8_t *out, uint8_t *in)
{
	uint8_t *memory;
	MPI_Win window;

	MPI_Win_allocate(LARGEST, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
	fill(out, LARGEST, rank + 40);
	MPI_Win_fence(0, window);
	MPI_Put(out, LARGEST, MPI_BYTE, 1 - rank, 0, LARGEST, MPI_BYTE, window);
	MPI_Win_fence(0, window);
	compare("what was put", memory, LARGEST, 1 - rank + 40);
	MPI_Win_fence(0, window);
	MPI_Get(in, LARGEST, MPI_BYTE, 1 - rank, 0, LARGEST, MPI_BYTE, window);
	MPI_Win_fence(0, window);
	compare("what was got", in, LARGEST, rank + 40);
	MPI_Win_free(&window);
}

// A counter of rank 0, to which both add.
static void add(void)
{
	enum { TIMES = 200 };
	int64_t *counter, one = 1, before, largest = -1;
	MPI_Win window;

	MPI_Win_allocate(sizeof(*counter), sizeof(*counter), MPI_INFO_NULL, MPI_COMM_WORLD, &counter, &window);
	MPI_Win_lock_all(0, window);
	*counter = 0;
	MPI_Win_sync(window);
	MPI_Barrier(MPI_COMM_WORLD);
	for (int i = 0; i < TIMES; i++) {
		MPI_Fetch_and_op(&one, &before, MPI_INT64_T, 0, 0, MPI_SUM, window);
		MPI_Win_flush(0, window);
		if (before <= largest)
			fail("a counter that grows", before);
		largest = before;
	}
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Fetch_and_op(&one, &before, MPI_INT64_T, 0, 0, MPI_NO_OP, window);
	MPI_Win_flush(0, window);
	if (before != 2 * TIMES)
		fail("what both added", before);
	MPI_Win_unlock_all(window);
	MPI_Win_free(&window);
}

static void broadcast_and_reduce(uint8_t *data)
{
	int64_t mine[1000], sum[1000];

	if (rank == 1)
		fill(data, LARGEST, 77);
	else
		memset(data, 0, LARGEST);
	MPI_Bcast(data, LARGEST, MPI_BYTE, 1, MPI_COMM_WORLD);
	compare("broadcast", data, LARGEST, 77);
	for (int i = 0; i < 1000; i++)
		mine[i] = (rank + 1) * i;
	MPI_Allreduce(mine, sum, 1000, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < 1000; i++)
		if (sum[i] != 3 * i)
			fail("sum", i);
}

int main(int argc, char **argv)
{
	uint8_t *out = malloc(LARGEST), *in = malloc(LARGEST);
	int ranks;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks != 2 || !out || !in) {
		fprintf(stderr, "two ranks with memory are wanted\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	send_and_receive(out, in);
	put_and_get(out, in);
	add();
	broadcast_and_reduce(in);
	printf("rank %d: %ld bytes compared\n", rank, compared);
	MPI_Finalize();
	return 0;
}
