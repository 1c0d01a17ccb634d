/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Kernel functions for dma-bounce-slots.c, in user space
 *
 * A "CPU" is a number that each thread chooses (shim_cpu), so that threads can share a CPU and move
 * between CPUs. All functions that order memory use C11 atomics, which ThreadSanitizer understands.
 * No function orders more than the kernel's function of the same name.
 */
#ifndef SHIM_H
#define SHIM_H

#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
typedef uint64_t dma_addr_t;
typedef uint64_t phys_addr_t;

#define BIT(n)			(1UL << (n))
#define SZ_1M			0x100000
#define GFP_KERNEL		0
#define __GFP_NOWARN		0
#define __percpu
#define __rcu
#define __counted_by(member)
#define noinline		__attribute__((__noinline__))
#define PAGE_SIZE		4096UL
#define NUMA_NO_NODE		(-1)
#define U64_MAX			UINT64_MAX
#define ____cacheline_aligned_in_smp __attribute__((aligned(64)))

#define likely(x)		__builtin_expect(!!(x), 1)
#define unlikely(x)		__builtin_expect(!!(x), 0)
#define min(a, b)		((a) < (b) ? (a) : (b))
#define max(a, b)		((a) > (b) ? (a) : (b))
#define min_t(type, a, b)	min((type)(a), (type)(b))
#define div_u64(a, b)		((a) / (b))
#define clamp(x, lo, hi)	min(max(x, lo), hi)
#define clamp_t(type, x, lo, hi) \
	((type)(x) < (type)(lo) ? (type)(lo) : (type)(x) > (type)(hi) ? (type)(hi) : (type)(x))
#define container_of(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))

#define READ_ONCE(x)		__atomic_load_n(&(x), __ATOMIC_RELAXED)
#define WRITE_ONCE(x, v)	__atomic_store_n(&(x), (v), __ATOMIC_RELAXED)
#define xchg(p, v)		__atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
#define smp_load_acquire(p)	__atomic_load_n((p), __ATOMIC_ACQUIRE)
#define smp_store_release(p, v)	__atomic_store_n((p), (v), __ATOMIC_RELEASE)

/* Memory */
#define struct_size(p, member, n) (sizeof(*(p)) + sizeof((p)->member[0]) * (n))
#define array_size(a, b)	((size_t)(a) * (b))
#define size_add(a, b)		((size_t)(a) + (b))
#define kvzalloc_node(size, gfp, node) ((void)(node), shim_zalloc(size))
#define kvcalloc(n, size, gfp)	shim_zalloc((n) * (size))
#define kvfree(p)		free(p)

/* Aligned like large allocations of the kernel */
static inline void *shim_zalloc(size_t size)
{
	size_t rounded = (size + 63) / 64 * 64;
	void *p = aligned_alloc(64, rounded);

	return p ? memset(p, 0, rounded) : NULL;
}

/* Lists */
struct list_head {
	struct list_head *next, *prev;
};

static inline void INIT_LIST_HEAD(struct list_head *list)
{
	list->next = list->prev = list;
}

static inline bool list_empty(const struct list_head *list)
{
	return list->next == list;
}

static inline void shim_link(struct list_head *node, struct list_head *before,
			     struct list_head *after)
{
	node->prev = before;
	node->next = after;
	before->next = after->prev = node;
}

static inline void list_add(struct list_head *node, struct list_head *head)
{
	shim_link(node, head, head->next);
}

static inline void list_add_tail(struct list_head *node, struct list_head *head)
{
	shim_link(node, head->prev, head);
}

static inline void list_del_init(struct list_head *node)
{
	node->prev->next = node->next;
	node->next->prev = node->prev;
	INIT_LIST_HEAD(node);
}

#define list_first_entry_or_null(head, type, member) \
	(list_empty(head) ? NULL : container_of((head)->next, type, member))

/* Locks. A holder can be preempted here, so waiting threads yield. */
typedef struct {
	bool held;
} raw_spinlock_t;

static inline void raw_spin_lock_init(raw_spinlock_t *lock)
{
	lock->held = false;
}

static inline void raw_spin_lock(raw_spinlock_t *lock)
{
	while (__atomic_exchange_n(&lock->held, true, __ATOMIC_ACQUIRE))
		sched_yield();
}

static inline void raw_spin_unlock(raw_spinlock_t *lock)
{
	__atomic_store_n(&lock->held, false, __ATOMIC_RELEASE);
}

#define raw_spin_lock_irq(lock)			raw_spin_lock(lock)
#define raw_spin_unlock_irq(lock)			raw_spin_unlock(lock)
#define local_irq_save(flags)			((void)((flags) = 0))
#define local_irq_restore(flags)		((void)(flags))
#define local_irq_disable()			((void)0)
#define local_irq_enable()			((void)0)

static inline void bit_spin_lock(int bit, unsigned long *word)
{
	while (__atomic_fetch_or(word, BIT(bit), __ATOMIC_ACQUIRE) & BIT(bit))
		sched_yield();
}

static inline void __bit_spin_unlock(int bit, unsigned long *word)
{
	__atomic_fetch_and(word, ~BIT(bit), __ATOMIC_RELEASE);
}

struct mutex {
	pthread_mutex_t lock;
};

#define mutex_init(m)		pthread_mutex_init(&(m)->lock, NULL)
#define mutex_lock(m)		pthread_mutex_lock(&(m)->lock)
#define mutex_unlock(m)		pthread_mutex_unlock(&(m)->lock)
#define lockdep_is_held(m)	true

/* CPUs. A CPU is online if its bit is set in shim_online. */
#define SHIM_CPUS		64

extern __thread unsigned int shim_cpu;
extern u64 shim_online;

#define cpu_online_mask			shim_online
#define for_each_possible_cpu(i)	for ((i) = 0; (i) < SHIM_CPUS; (i)++)
#define for_each_cpu_wrap(i, mask, start) \
	for (unsigned int _k = 0; (i) = ((start) + _k) % SHIM_CPUS, _k < SHIM_CPUS; _k++) \
		if ((mask) >> (i) & 1)
#define num_online_cpus()		((unsigned int)__builtin_popcountll(shim_online))
#define raw_smp_processor_id()		shim_cpu
#define __alloc_percpu(size, align)	shim_zalloc(SHIM_CPUS * (size))
#define free_percpu(p)			free(p)
#define per_cpu_ptr(p, i)		(&(p)[i])
#define raw_cpu_ptr(p)			(&(p)[shim_cpu])

/* Time, which the test advances */
extern unsigned long shim_jiffies;

#define HZ			100
#define jiffies			READ_ONCE(shim_jiffies)
#define time_before(a, b)	((long)((a) - (b)) < 0)
#define time_after_eq(a, b)	((long)((a) - (b)) >= 0)

/* RCU: each thread counts the begins and ends of its critical sections. */
struct rcu_head {
	int unused;
};

void rcu_read_lock(void);
void rcu_read_unlock(void);
void synchronize_rcu(void);

#define rcu_dereference(p)		__atomic_load_n(&(p), __ATOMIC_ACQUIRE)
#define rcu_dereference_protected(p, c)	((void)(c), __atomic_load_n(&(p), __ATOMIC_RELAXED))
#define rcu_assign_pointer(p, v)	__atomic_store_n(&(p), (v), __ATOMIC_RELEASE)
#define RCU_INIT_POINTER(p, v)		__atomic_store_n(&(p), (v), __ATOMIC_RELAXED)
#define kvfree_rcu(p, head)		(synchronize_rcu(), free(p))

#endif
