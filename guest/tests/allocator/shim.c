// SPDX-License-Identifier: GPL-2.0-only
/* RCU in user space: see shim.h */

#include "shim.h"

#define MAX_THREADS	64

__thread unsigned int shim_cpu;
u64 shim_online = 0xffff;
unsigned long shim_jiffies;

/*
 * Count of a thread, odd while the thread is in a critical section. Each count has its own
 * cache line.
 */
static struct {
	unsigned long count;
} __attribute__((aligned(64))) sections[MAX_THREADS];

static unsigned int nthreads;
static __thread unsigned int thread_number;

static unsigned long *my_section(void)
{
	if (!thread_number)
		thread_number = __atomic_add_fetch(&nthreads, 1, __ATOMIC_RELAXED);
	if (thread_number > MAX_THREADS)
		abort();
	return &sections[thread_number - 1].count;
}

void rcu_read_lock(void)
{
	unsigned long *count = my_section();

	/*
	 * Sequentially consistent, so that other threads see the new count before the
	 * section's first read.
	 */
	__atomic_exchange_n(count, READ_ONCE(*count) + 1, __ATOMIC_SEQ_CST);
}

void rcu_read_unlock(void)
{
	unsigned long *count = my_section();

	__atomic_store_n(count, READ_ONCE(*count) + 1, __ATOMIC_RELEASE);
}

void synchronize_rcu(void)
{
	unsigned long seen;
	unsigned int i;

	for (i = 0; i < MAX_THREADS; i++) {
		/* This read is ordered after the caller's earlier writes. */
		seen = __atomic_fetch_add(&sections[i].count, 0, __ATOMIC_SEQ_CST);
		while (seen & 1 && __atomic_load_n(&sections[i].count, __ATOMIC_ACQUIRE) == seen)
			sched_yield();
	}
}
