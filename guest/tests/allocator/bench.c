// SPDX-License-Identifier: GPL-2.0-only
/*
 * Benchmark of how the allocator of bounce slots scales. Threads take and return slots, each on its
 * own CPU, with a few slots in flight. Runs with 1, 2, 4, 8 and 16 threads. Prints the operations
 * per second of all threads together, and the average per thread, or per core if there are fewer
 * cores. One operation takes and returns a slot.
 */

#include "shim.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "../../src/drivers/iommu/dma-bounce-slots.h"

#define CHUNK_SHIFT	21
#define CHUNKS		16
#define BASE		0xc0000000UL
#define DEPTH		8
#define THREADS		16

static struct dma_bounce_slots slots;
static bool stop;
static pthread_barrier_t barrier;

struct result {
	unsigned long ops;
} __attribute__((aligned(64)));

static struct result results[THREADS];

static void on_notify(struct dma_bounce_slots *unused)
{
	(void)unused;
}

static void *user(void *arg)
{
	struct dma_bounce_slot *held[DEPTH];
	unsigned int i, n;
	unsigned long ops = 0;

	shim_cpu = (uintptr_t)arg;
	pthread_barrier_wait(&barrier);
	while (!READ_ONCE(stop)) {
		n = 1 + ops % DEPTH;
		for (i = 0; i < n; i++) {
			rcu_read_lock();
			held[i] = dma_bounce_slots_get(&slots, DMA_BOUNCE_RW, 0, DMA_BOUNCE_SINGLE);
			rcu_read_unlock();
			if (!held[i])
				abort();
		}
		for (i = 0; i < n; i++) {
			rcu_read_lock();
			dma_bounce_slots_put(&slots, held[i]);
			rcu_read_unlock();
		}
		ops += n;
	}
	results[shim_cpu].ops = ops;
	return NULL;
}

static void run(unsigned int nthreads, double seconds)
{
	struct timespec wait = { (time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9) };
	unsigned int cores = sysconf(_SC_NPROCESSORS_ONLN);
	pthread_t threads[THREADS];
	unsigned long sum = 0;
	uintptr_t i;

	WRITE_ONCE(stop, false);
	pthread_barrier_init(&barrier, NULL, nthreads + 1);
	for (i = 0; i < nthreads; i++)
		if (pthread_create(&threads[i], NULL, user, (void *)i))
			abort();
	pthread_barrier_wait(&barrier);
	nanosleep(&wait, NULL);
	WRITE_ONCE(stop, true);
	for (i = 0; i < nthreads; i++) {
		pthread_join(threads[i], NULL);
		sum += results[i].ops;
	}
	pthread_barrier_destroy(&barrier);
	printf("%7u %12.2f %24.2f\n", nthreads, sum / seconds / 1e6,
	       sum / seconds / 1e6 / min(nthreads, cores));
}

int main(void)
{
	struct dma_bounce_chunk *chunk;
	unsigned int i, n;

	dma_bounce_slots_init(&slots, on_notify);
	if (dma_bounce_slots_open(&slots, BASE, (u64)CHUNKS << CHUNK_SHIFT, CHUNK_SHIFT))
		return 1;
	for (i = 0; i < CHUNKS; i++) {
		chunk = dma_bounce_chunk_alloc(DMA_BOUNCE_RW, 0, 1UL << CHUNK_SHIFT, NUMA_NO_NODE);
		if (!chunk)
			return 1;
		/* The benchmark does not access the memory of slots. */
		dma_bounce_chunk_publish(&slots, chunk, NULL, BASE + ((dma_addr_t)i << CHUNK_SHIFT),
					 1UL << CHUNK_SHIFT);
	}
	printf("threads  million op/s  for each running thread\n");
	for (n = 1; n <= THREADS; n *= 2)
		run(n, 0.5);
	return 0;
}
