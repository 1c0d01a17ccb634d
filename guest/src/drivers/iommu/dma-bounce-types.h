/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The pool of a DMA domain, what it counts, and where a device has it: what all parts of bouncing
 * small DMA look at. What is done with a pool is in the parts' own headers.
 */
#ifndef _DMA_BOUNCE_TYPES_H
#define _DMA_BOUNCE_TYPES_H

#include <linux/atomic.h>
#include <linux/dma-bounce.h>
#include <linux/dma-direction.h>
#include <linux/iommu.h>
#include <linux/log2.h>
#include <linux/percpu.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "dma-bounce-slots.h"

struct dentry;
struct dma_bounce_pool;
struct iova;
struct iova_domain;

/**
 * struct dma_bounce_loan_ops - what is done about memory that applications have of a pool
 * @reap:	Takes back what nobody uses any more. The pool's mutex is held.
 * @stop:	Takes back everything. The pool's mutex is held, but while it waits for somebody.
 */
struct dma_bounce_loan_ops {
	void (*reap)(struct dma_bounce_pool *pool);
	void (*stop)(struct dma_bounce_pool *pool);
};

enum dma_bounce_stat {
	DMA_BOUNCE_BYTES_IN,		/* copied from buffers to slots */
	DMA_BOUNCE_BYTES_OUT,		/* copied from slots to buffers */
	DMA_BOUNCE_UNWRITTEN,		/* not copied back, as not known to be written */
	DMA_BOUNCE_LENT,		/* buffers in lent memory, which are not copied */
	DMA_BOUNCE_SINGLE_USE,		/* served by a buffer of their own, as they must bounce */
	DMA_BOUNCE_SYNCS,		/* sync calls for something bounced */
	DMA_BOUNCE_ELISION_LOST,	/* times that a device began to need sync calls */
	DMA_BOUNCE_FB_STARTING,		/* not bounced: the pool is not ready yet */
	DMA_BOUNCE_FB_FULL,		/* ... no slot free */
	DMA_BOUNCE_FB_SIZE,		/* ... larger than the threshold or the largest slot */
	DMA_BOUNCE_FB_LAYOUT,		/* ... list cannot be packed as the device wants it */
	DMA_BOUNCE_FB_MASK,		/* ... device cannot address the pool */
	DMA_BOUNCE_FB_ATTRS,		/* ... attributes forbid it */
	DMA_BOUNCE_FB_MEMORY,		/* ... peer-to-peer or otherwise no memory to copy */
	DMA_BOUNCE_STATS,
};

struct dma_bounce_stats {
	u64	count[DMA_BOUNCE_STATS];
};

/**
 * struct dma_bounce_pool - the bounce memory of one DMA domain
 * @threshold:	size in bytes up to which mappings are bounced
 * @stats:	per-CPU counters; how many mappings bounced, and the bytes that were copied to and
 *		from slots, are counted with @slots
 * @slots:	its slots; the mutex in it also protects everything from @active on
 * @domain:	the domain
 * @iovad:	its IOVA allocator
 * @ops:	the provider of memory
 * @list:	in the list of all pools
 * @dir:	in debugfs
 * @name:	the first device of the domain, for messages
 * @id:		number of the pool, for debugfs
 * @node:	NUMA node of the first device
 * @mask:	what the device that mapped first can address; 0 before that
 * @threshold_option: what the boot option says of @threshold, 0 if nothing
 * @calibrated:	@threshold as measured, 0 if it was not
 * @missed:	mappings that found no slot since the work looked last, or a chunk was added
 * @single_use:	buffers for one mapping each, by the numbers of their pages
 * @nsingle_use: how many
 * @work:	adds and removes chunks
 * @idle_work:	gives idle chunks back
 * @range:	IOVA taken for chunks of the kernel's own pages; goes with @iovad
 * @source:	what its memory comes out of, which other pools may share; NULL before it is known
 * @no_memory:	called with the mutex held when there is no memory within the pool's own limit
 * @starved:	it found no memory since the others were asked for some
 * @retry_at:	do not try to add chunks before, in jiffies
 * @idle_ms:	how long a chunk must have been idle to be given back; the last of its kind and
 *		size is kept DMA_BOUNCE_KEEP_FACTOR times as long
 * @active:	devices are attached
 * @budget:	most bytes of chunks
 * @backed:	bytes of chunks that have memory
 * @nchunks:	number of them
 * @ndraining:	how many of them are to be given back when the last slot comes back
 * @retired_at:	when the last one of those was chosen, in jiffies
 * @first_place: where to look first for a place for the next chunk
 * @peak:	most bytes that ever were backed
 * @adds:	chunks ever added
 * @dels:	chunks ever given back or lost
 * @ahead:	chunks added before a mapping found no slot
 * @failures:	failed attempts to add a chunk for mappings that found none
 * @stuck:	failed attempts to give one back
 * @recycled:	chunks cut anew for another size
 * @shrunk:	chunks given back because they were idle
 * @drained:	chunks given back, when they had become idle, because the budget was lowered
 * @yielded:	chunks given up, at once or when they are idle, for another domain
 * @region:	where memory that can be lent is
 * @loan_ops:	what is done about loans, once there may be some
 * @loans:	what applications have
 * @lent:	bytes of chunks that they have
 * @orphaned:	slots that were mapped when their chunk went away
 *
 * What each mapping reads is in the first cache line.
 */
struct dma_bounce_pool {
	size_t				threshold;
	struct dma_bounce_stats __percpu *stats;
	struct dma_bounce_slots		slots;
	struct iommu_domain		*domain;
	struct iova_domain		*iovad;
	const struct dma_bounce_ops	*ops;
	struct list_head		list;
	struct dentry			*dir;
	const char			*name;
	int				id;
	int				node;

	u64				mask;
	size_t				threshold_option;
	size_t				calibrated;
	atomic_t			missed[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES];
	struct xarray			single_use;
	atomic_t			nsingle_use;

	struct work_struct		work;
	struct delayed_work		idle_work;
	struct iova			*range;
	const void			*source;
	void				(*no_memory)(struct dma_bounce_pool *pool);
	bool				starved;
	unsigned long			retry_at;
	u32				idle_ms;
	bool				active;
	u64				budget;
	u64				backed;
	unsigned int			nchunks;
	unsigned int			ndraining;
	unsigned long			retired_at;
	unsigned long			first_place;
	u64				peak;
	u64				adds;
	u64				dels;
	u64				ahead;
	u64				failures;
	u64				stuck;
	u64				recycled;
	u64				shrunk;
	u64				drained;
	u64				yielded;
	u64				orphaned;
	struct dma_bounce_region	region;
	const struct dma_bounce_loan_ops *loan_ops;
	struct list_head		loans;
	u64				lent;
};

static_assert(offsetof(struct dma_bounce_pool, slots.cap) + DMA_BOUNCE_CLASSES <= 64);

#define dma_bounce_count(pool, stat, n) this_cpu_add((pool)->stats->count[stat], n)

static inline bool dma_bounce_untrusted(struct device *dev)
{
	return dev->iommu->bounce.untrusted;
}

/* The pool of a device's DMA domain, or NULL */
static inline struct dma_bounce_pool *dma_bounce_pool_of(struct device *dev)
{
	return READ_ONCE(dev->iommu->bounce.pool);
}

/* Size in bytes up to which mappings of a device bounce */
static inline size_t dma_bounce_threshold(struct dma_bounce_pool *pool, struct device *dev)
{
	return READ_ONCE(dev->iommu->bounce.threshold) ?: READ_ONCE(pool->threshold);
}

/* Class of the smallest slots that have @size bytes, at most DMA_BOUNCE_MAX_SLOT */
static inline unsigned int dma_bounce_class(size_t size)
{
	return max(order_base_2(size), DMA_BOUNCE_MIN_SHIFT) - DMA_BOUNCE_MIN_SHIFT;
}

/*
 * Whether a sync call has to copy, as far as its direction tells: towards a device that reads, or
 * back from one that writes
 */
static inline bool dma_bounce_sync_copies(enum dma_data_direction dir, bool for_device)
{
	return dir != (for_device ? DMA_FROM_DEVICE : DMA_TO_DEVICE);
}

static inline bool dma_bounce_owns(struct dma_bounce_pool *pool, dma_addr_t addr)
{
	return dma_bounce_slots_own(&pool->slots, addr);
}

static inline void dma_bounce_loans_reap(struct dma_bounce_pool *pool)
{
	const struct dma_bounce_loan_ops *ops = READ_ONCE(pool->loan_ops);

	if (ops)
		ops->reap(pool);
}

static inline void dma_bounce_loans_stop(struct dma_bounce_pool *pool)
{
	const struct dma_bounce_loan_ops *ops = READ_ONCE(pool->loan_ops);

	if (ops)
		ops->stop(pool);
}

#endif /* _DMA_BOUNCE_TYPES_H */
