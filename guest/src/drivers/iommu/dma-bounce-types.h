/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shared types of DMA bouncing: the pool of a DMA domain, its counters, and the lookup of a
 * device's pool. The functions that work on a pool are in the headers of their own parts.
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
 * struct dma_bounce_loan_ops - operations on memory that a pool has lent to applications
 * @reap:	Takes back memory that is no longer used. The pool's mutex is held.
 * @stop:	Takes back all lent memory, also memory whose pages are still held. The pool's
 *		mutex is held.
 * @forget:	Forgets all loans, because the pool is about to be freed. The pool's mutex is held.
 */
struct dma_bounce_loan_ops {
	void (*reap)(struct dma_bounce_pool *pool);
	void (*stop)(struct dma_bounce_pool *pool);
	void (*forget)(struct dma_bounce_pool *pool);
};

enum dma_bounce_stat {
	DMA_BOUNCE_BYTES_IN,		/* copied from buffers to slots */
	DMA_BOUNCE_BYTES_OUT,		/* copied from slots to buffers */
	DMA_BOUNCE_UNWRITTEN,		/* not copied back: the driver reported no full write */
	DMA_BOUNCE_LENT,		/* buffers in lent memory, which are not copied */
	DMA_BOUNCE_SINGLE_USE,		/* must bounce, and got a buffer for one mapping */
	DMA_BOUNCE_SYNCS,		/* sync calls for bounced mappings */
	DMA_BOUNCE_ELISION_LOST,	/* times that a device began to need sync calls */
	DMA_BOUNCE_FB_STARTING,		/* not bounced: the pool is not ready yet */
	DMA_BOUNCE_FB_FULL,		/* ... no slot free */
	DMA_BOUNCE_FB_SIZE,		/* ... larger than the threshold or the largest slot */
	DMA_BOUNCE_FB_LAYOUT,		/* ... list cannot be packed as the device needs it */
	DMA_BOUNCE_FB_MASK,		/* ... device cannot address the pool */
	DMA_BOUNCE_FB_ATTRS,		/* ... attributes forbid it */
	DMA_BOUNCE_FB_MEMORY,		/* ... peer-to-peer or other memory that has no copy */
	DMA_BOUNCE_STATS,
};

struct dma_bounce_stats {
	u64	count[DMA_BOUNCE_STATS];
};

/**
 * struct dma_bounce_pool - bounce memory of one DMA domain
 * @threshold:	thresholds of the domain
 * @stats:	per-CPU counters. @slots counts the mappings that bounced, and the bytes that were
 *		copied to and from slots.
 * @slots:	slots of the pool. Their mutex also protects all members from @active on.
 * @domain:	DMA domain of the pool
 * @iovad:	IOVA allocator of the domain
 * @ops:	provider of memory
 * @list:	entry in the list of all pools
 * @dir:	directory in debugfs
 * @name:	first device of the domain, for messages
 * @id:		number of the pool, for debugfs
 * @node:	NUMA node of the first device
 * @mask:	DMA mask of the device that mapped first, 0 before the first mapping
 * @threshold_option: thresholds that the boot option sets. 0 has the same meaning as in struct
 *		dma_bounce_limits.
 * @calibrated:	measured thresholds, 0 if they were not measured
 * @missed:	mappings that found no slot since @work last read this, or since a chunk was added
 * @single_use:	buffers for one mapping each, indexed by the page numbers of their IOVA
 * @nsingle_use: number of entries in @single_use
 * @work:	adds and removes chunks
 * @idle_work:	gives idle chunks back
 * @range:	IOVA range for chunks of the kernel's own pages. It is freed with @iovad.
 * @source:	memory budget that the pool draws on and may share with other pools, NULL before it
 *		is known
 * @no_memory:	called with the mutex held if there is no memory within the pool's own limit
 * @starved:	the pool found no memory since other pools were last asked for some
 * @warned:	the kernel log has a warning about lost data
 * @retry_at:	earliest time of the next attempt to add chunks, in jiffies
 * @idle_ms:	time in ms after which an idle chunk is given back. The last chunk of its kind and
 *		size is kept DMA_BOUNCE_KEEP_FACTOR times as long.
 * @active:	devices are attached
 * @budget:	maximum number of bytes of all chunks
 * @backed:	bytes of chunks that have memory
 * @nchunks:	number of chunks that have memory
 * @ndraining:	number of chunks that are given back when their last slot returns
 * @retired_at:	time at which a chunk was last selected for draining, in jiffies
 * @first_place: first place to try for the next chunk
 * @peak:	maximum of @backed so far
 * @adds:	chunks that were added
 * @dels:	chunks that were given back or lost
 * @ahead:	chunks that were added before a mapping found no slot
 * @failures:	failed attempts to add a chunk for mappings that found no slot
 * @stuck:	failed attempts to give a chunk back
 * @recycled:	chunks that were cut again for another size
 * @shrunk:	chunks that were given back because they were idle
 * @drained:	chunks that were retired and given back when their last slot returned
 * @yielded:	chunks that were given up for another domain, at once or when they became idle
 * @blocked:	chunks that could not be used because something held pages of their memory
 * @region:	memory that can be lent
 * @loan_ops:	operations on loans, NULL as long as there cannot be any
 * @loans:	list of the loans to applications
 * @lent:	bytes of chunks that are lent
 * @orphaned:	slots that were mapped when their chunk lost its memory
 *
 * The members that each mapping reads are in the first cache line.
 */
struct dma_bounce_pool {
	struct dma_bounce_thresholds	threshold;
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
	struct dma_bounce_thresholds	threshold_option;
	struct dma_bounce_thresholds	calibrated;
	atomic_t			missed[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES];
	struct xarray			single_use;
	atomic_t			nsingle_use;

	struct work_struct		work;
	struct delayed_work		idle_work;
	struct iova			*range;
	const void			*source;
	void				(*no_memory)(struct dma_bounce_pool *pool);
	bool				starved;
	bool				warned;
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
	u64				blocked;
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

/* Returns the pool of a device's DMA domain, or NULL. */
static inline struct dma_bounce_pool *dma_bounce_pool_of(struct device *dev)
{
	return READ_ONCE(dev->iommu->bounce.pool);
}

/* Returns the maximum size in bytes of a device's mappings in a direction that bounce. */
static inline size_t dma_bounce_threshold(struct dma_bounce_pool *pool, struct device *dev,
					  enum dma_data_direction dir)
{
	struct dma_bounce_thresholds *own = &dev->iommu->bounce.threshold, *all = &pool->threshold;
	size_t limit = SIZE_MAX;

	if (dir != DMA_FROM_DEVICE)
		limit = READ_ONCE(own->read) ?: READ_ONCE(all->read);
	if (dir != DMA_TO_DEVICE)
		limit = min_t(size_t, limit, READ_ONCE(own->write) ?: READ_ONCE(all->write));
	return limit;
}

/* Returns the class of the smallest slots that hold @size bytes, at most DMA_BOUNCE_MAX_SLOT. */
static inline unsigned int dma_bounce_class(size_t size)
{
	return max(order_base_2(size), DMA_BOUNCE_MIN_SHIFT) - DMA_BOUNCE_MIN_SHIFT;
}

/*
 * Returns true if the direction of a sync call requires a copy: to a device that reads, or from a
 * device that writes.
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

static inline void dma_bounce_loans_forget(struct dma_bounce_pool *pool)
{
	const struct dma_bounce_loan_ops *ops = READ_ONCE(pool->loan_ops);

	if (ops)
		ops->forget(pool);
}

#endif /* _DMA_BOUNCE_TYPES_H */
