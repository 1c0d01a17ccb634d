/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The bounce memory of a DMA domain; see the comment at the top of dma-bounce-pool.c.
 */
#ifndef _DMA_BOUNCE_POOL_H
#define _DMA_BOUNCE_POOL_H

#include <linux/atomic.h>
#include <linux/dma-bounce.h>
#include <linux/dma-direction.h>
#include <linux/iommu.h>
#include <linux/log2.h>
#include <linux/percpu.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "dma-bounce-slots.h"

/* The most that idle_ms can be: a day, a multiple of which does not overflow in jiffies */
#define DMA_BOUNCE_MAX_IDLE_MS	(24 * 60 * 60 * 1000)

struct dentry;
struct iova;
struct iova_domain;

/* What sysfs says about one device */
enum dma_bounce_switch {
	DMA_BOUNCE_SWITCH_AUTO,
	DMA_BOUNCE_SWITCH_ON,
	DMA_BOUNCE_SWITCH_OFF,
};

enum dma_bounce_stat {
	DMA_BOUNCE_BYTES_IN,		/* copied from buffers to slots */
	DMA_BOUNCE_BYTES_OUT,		/* copied from slots to buffers */
	DMA_BOUNCE_UNWRITTEN,		/* not copied back, as not known to be written */
	DMA_BOUNCE_SINGLE_USE,		/* served by a buffer of their own, as they must bounce */
	DMA_BOUNCE_SYNCS,		/* sync calls for something bounced */
	DMA_BOUNCE_SYNCS_PLAIN,		/* ... for something else, by devices that have bounced */
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
 * @slots:	its slots; the mutex in it also protects everything from @active on
 * @domain:	the domain
 * @iovad:	its IOVA allocator
 * @ops:	the provider of memory
 * @list:	in the list of all pools
 * @dir:	in debugfs
 * @name:	the first device of the domain, for messages
 * @id:		number of the pool, for debugfs
 * @stats:	per-CPU counters; how many mappings bounced is counted with @slots
 * @mask:	what the device that mapped first can address; 0 before that
 * @threshold:	size in bytes up to which mappings are bounced
 * @threshold_option: what the boot option says of it, 0 if nothing
 * @calibrated:	@threshold as measured, 0 if it was not
 * @missed:	mappings that found no slot since the work looked last
 * @single_use:	buffers for one mapping each, by the numbers of their pages
 * @nsingle_use: how many
 * @work:	adds and removes chunks
 * @idle_work:	gives idle chunks back
 * @range:	IOVA taken for chunks of the kernel's own pages; goes with @iovad
 * @retry_at:	do not try to add chunks before, in jiffies
 * @idle_ms:	how long a chunk must have been idle to be given back; the last of its kind and
 *		size is kept DMA_BOUNCE_KEEP_FACTOR times as long
 * @active:	devices are attached
 * @refresh:	the provider's limits are to be read again
 * @budget:	most bytes of chunks
 * @backed:	bytes of chunks that have memory
 * @nchunks:	number of them
 * @ndraining:	how many of them are to be given back when the last slot comes back
 * @peak:	most bytes that ever were backed
 * @adds:	chunks ever added
 * @dels:	chunks ever given back or lost
 * @failures:	failed attempts to add a chunk
 * @stuck:	failed attempts to give one back
 * @recycled:	chunks cut anew for another size
 * @shrunk:	chunks given back because they were idle
 * @drained:	chunks given back, when they had become idle, because the budget was lowered
 * @orphaned:	slots that were mapped when their chunk went away
 */
struct dma_bounce_pool {
	struct dma_bounce_slots		slots;
	struct iommu_domain		*domain;
	struct iova_domain		*iovad;
	const struct iommu_bounce_ops	*ops;
	struct list_head		list;
	struct dentry			*dir;
	const char			*name;
	int				id;
	struct dma_bounce_stats __percpu *stats;

	u64				mask;
	size_t				threshold;
	size_t				threshold_option;
	size_t				calibrated;
	atomic_t			missed[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES];
	struct xarray			single_use;
	atomic_t			nsingle_use;

	struct work_struct		work;
	struct delayed_work		idle_work;
	struct iova			*range;
	unsigned long			retry_at;
	u32				idle_ms;
	bool				active;
	bool				refresh;
	u64				budget;
	u64				backed;
	unsigned int			nchunks;
	unsigned int			ndraining;
	u64				peak;
	u64				adds;
	u64				dels;
	u64				failures;
	u64				stuck;
	u64				recycled;
	u64				shrunk;
	u64				drained;
	u64				orphaned;
};

#define dma_bounce_count(pool, stat, n) this_cpu_add((pool)->stats->count[stat], n)

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

struct dma_bounce_pool *dma_bounce_pool_create(struct iommu_domain *domain,
					       struct iova_domain *iovad,
					       const struct iommu_bounce_ops *ops, const char *name,
					       size_t threshold);
void dma_bounce_pool_destroy(struct dma_bounce_pool *pool);
void dma_bounce_pool_stop(struct dma_bounce_pool *pool);
void dma_bounce_pool_resume(struct dma_bounce_pool *pool);
void dma_bounce_pool_refresh(struct dma_bounce_pool *pool);
void dma_bounce_pool_first_use(struct dma_bounce_pool *pool, u64 mask);
void dma_bounce_pool_missed(struct dma_bounce_pool *pool, enum dma_bounce_kind kind,
			    unsigned int class);

/**
 * dma_bounce_pool_get - take a free slot
 * @pool: a pool that is ready, as dma_bounce_owns() or pool->slots.len tells
 * @kind: what the device may do with it
 * @size: bytes needed, at most DMA_BOUNCE_MAX_SLOT
 * @mapped: what for
 *
 * The caller is in an RCU read-side critical section until it is done with the slot's memory.
 *
 * Return: a slot whose size is the next power of two, or NULL if there is none now; then there may
 * be soon.
 */
static inline struct dma_bounce_slot *dma_bounce_pool_get(struct dma_bounce_pool *pool,
							  enum dma_bounce_kind kind, size_t size,
							  enum dma_bounce_mapped mapped)
{
	unsigned int class = dma_bounce_class(size);
	struct dma_bounce_slot *slot = dma_bounce_slots_get(&pool->slots, kind, class, mapped);

	if (unlikely(!slot))
		dma_bounce_pool_missed(pool, kind, class);
	return slot;
}

/* Single-use buffers: dma-bounce-single.c */
dma_addr_t dma_bounce_single_map(struct dma_bounce_pool *pool, u64 mask, phys_addr_t phys,
				 size_t size, enum dma_data_direction dir, unsigned long attrs);
bool dma_bounce_single_unmap(struct dma_bounce_pool *pool, dma_addr_t addr, unsigned long attrs);
bool dma_bounce_single_sync(struct dma_bounce_pool *pool, dma_addr_t addr, size_t size,
			    enum dma_data_direction dir, bool for_device);
void dma_bounce_single_free_all(struct dma_bounce_pool *pool);

void dma_bounce_copy(void *buffer, phys_addr_t phys, size_t len, bool to_buffer);

size_t dma_bounce_calibrate(struct dma_bounce_pool *pool);

extern const struct iommu_bounce_ops dma_bounce_page_ops;

#if IS_ENABLED(CONFIG_KUNIT)
extern atomic_long_t dma_bounce_page_total;
u64 dma_bounce_page_limit(void);
#endif

void dma_bounce_pool_set_idle(struct dma_bounce_pool *pool, u32 ms);
void dma_bounce_debugfs_add(struct dma_bounce_pool *pool);
void dma_bounce_debugfs_del(struct dma_bounce_pool *pool);

#endif /* _DMA_BOUNCE_POOL_H */
