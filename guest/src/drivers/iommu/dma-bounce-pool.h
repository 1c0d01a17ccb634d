/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The pool behind the bouncing of small DMA; see the comment at the top of dma-bounce-pool.c.
 */
#ifndef _DMA_BOUNCE_POOL_H
#define _DMA_BOUNCE_POOL_H

#include <linux/bits.h>
#include <linux/dma-bounce.h>
#include <linux/dma-direction.h>
#include <linux/iommu.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/rcupdate.h>
#include <linux/sizes.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

struct dentry;
struct iova_domain;
struct scatterlist;

/* Slots are 4 KiB to 256 KiB: 128 KiB that start in the middle of a page need the largest. */
#define DMA_BOUNCE_MIN_SHIFT	12
#define DMA_BOUNCE_CLASSES	7
#define DMA_BOUNCE_MAX_SHIFT	(DMA_BOUNCE_MIN_SHIFT + DMA_BOUNCE_CLASSES - 1)
#define DMA_BOUNCE_MAX_SLOT	BIT(DMA_BOUNCE_MAX_SHIFT)

/* Most slots of one kind and class that a CPU keeps to itself */
#define DMA_BOUNCE_CACHE_SLOTS	32
/* ... and most bytes, but for the largest slots */
#define DMA_BOUNCE_CACHE_BYTES	SZ_1M
#define DMA_BOUNCE_CACHE_MIN	4

/* What sysfs says about one device */
enum dma_bounce_switch {
	DMA_BOUNCE_SWITCH_AUTO,
	DMA_BOUNCE_SWITCH_ON,
	DMA_BOUNCE_SWITCH_OFF,
};

/* What the device may do with a slot, as with mainline's mappings of the three directions. */
enum dma_bounce_kind {
	DMA_BOUNCE_READ,
	DMA_BOUNCE_WRITE,
	DMA_BOUNCE_RW,
	DMA_BOUNCE_KINDS,
};

enum dma_bounce_stat {
	DMA_BOUNCE_PAGES,		/* single mappings bounced */
	DMA_BOUNCE_LISTS,		/* scatter-gather lists bounced */
	DMA_BOUNCE_BYTES_IN,		/* copied from buffers to slots */
	DMA_BOUNCE_BYTES_OUT,		/* copied from slots to buffers */
	DMA_BOUNCE_UNWRITTEN,		/* not copied back, as not known to be written */
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

struct dma_bounce_chunk;

/**
 * struct dma_bounce_slot - one bounce buffer, and what is mapped by it
 * @chunk:	where it is
 * @phys:	what a single mapping bounces
 * @sgl:	what a list mapping bounces
 * @nents:	entries of @sgl; 0 for a single mapping
 * @offset:	where in the slot the mapped bytes start
 * @len:	mapped bytes; 0 if the slot is free
 * @no_copy_in:	holds older data where the device does not write
 */
struct dma_bounce_slot {
	struct dma_bounce_chunk	*chunk;
	union {
		phys_addr_t		phys;
		struct scatterlist	*sgl;
	};
	unsigned int		nents;
	unsigned int		offset;
	unsigned int		len;
	bool			no_copy_in;
};

/**
 * struct dma_bounce_chunk - a piece of provider memory, cut into slots of one size
 * @node:	in the depot's list, if any slot is in the depot
 * @rcu:	frees this structure
 * @va:		where the CPU sees it; not to be used once @dead
 * @iova:	where devices see it
 * @size:	bytes
 * @kind:	&enum dma_bounce_kind
 * @class:	log2 of the slot size, less DMA_BOUNCE_MIN_SHIFT
 * @dead:	the memory is gone; slots that are still mapped are orphans
 * @nslots:	number of slots
 * @nfree:	how many of them are in the depot; the depot's lock protects this and the next two
 * @idle_since:	when @nfree became @nslots, in jiffies
 * @free:	stack of the numbers of slots in the depot
 * @slots:	the slots
 */
struct dma_bounce_chunk {
	struct list_head	node;
	struct rcu_head		rcu;
	void			*va;
	dma_addr_t		iova;
	size_t			size;
	u8			kind;
	u8			class;
	bool			dead;
	unsigned int		nslots;
	unsigned int		nfree;
	unsigned long		idle_since;
	u32			*free;
	struct dma_bounce_slot	slots[] __counted_by(nslots);
};

struct dma_bounce_depot {
	spinlock_t		lock;	/* protects this and the free slots of its chunks */
	struct list_head	chunks;	/* those with a slot in the depot */
	unsigned int		nslots;
	unsigned int		nfree;
};

struct dma_bounce_cpu {
	spinlock_t		lock;	/* nests outside the depots' locks */
	u8			n[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES];
	struct dma_bounce_slot	*slots[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES]
				      [DMA_BOUNCE_CACHE_SLOTS];
};

/**
 * struct dma_bounce_pool - the bounce memory of one DMA domain
 * @domain:	the domain
 * @iovad:	its IOVA allocator
 * @ops:	the provider of memory
 * @list:	in the list of all pools
 * @dir:	in debugfs
 * @name:	the first device of the domain, for messages
 * @id:		number of the pool, for debugfs
 * @stats:	per-CPU counters
 * @base:	first IOVA of the pool; valid once @len is not 0
 * @len:	bytes of IOVA, 0 as long as the pool is not ready to be used
 * @mask:	what the device that mapped first can address; 0 before that
 * @chunk_shift: log2 of the distance of chunks
 * @threshold:	size in bytes up to which mappings are bounced
 * @cpus:	per-CPU caches of slots
 * @chunks:	by (IOVA - @base) >> @chunk_shift
 * @depots:	free slots
 * @missed:	mappings that found no slot since the work looked last
 * @mutex:	serialises adding and removing chunks, and protects what follows
 * @work:	adds and removes chunks
 * @active:	devices are attached
 * @refresh:	the provider's limits are to be read again
 * @retry_at:	do not try to add chunks before, in jiffies
 * @budget:	most bytes of chunks
 * @backed:	bytes of live chunks
 * @nchunks:	number of live chunks
 * @peak:	most bytes that ever were live
 * @adds:	chunks ever added
 * @dels:	chunks ever given back or lost
 * @failures:	failed attempts to add a chunk
 * @recycled:	chunks cut anew for another size
 * @orphaned:	slots that were mapped when their chunk went away
 */
struct dma_bounce_pool {
	struct iommu_domain		*domain;
	struct iova_domain		*iovad;
	const struct iommu_bounce_ops	*ops;
	struct list_head		list;
	struct dentry			*dir;
	const char			*name;
	int				id;
	struct dma_bounce_stats __percpu *stats;

	dma_addr_t			base;
	u64				len;
	u64				mask;
	unsigned int			chunk_shift;
	size_t				threshold;
	struct dma_bounce_cpu __percpu	*cpus;
	struct dma_bounce_chunk __rcu	**chunks;
	struct dma_bounce_depot		depots[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES];
	atomic_t			missed[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES];

	struct mutex			mutex;	/* serialises adding and removing chunks */
	struct work_struct		work;
	bool				active;
	bool				refresh;
	unsigned long			retry_at;
	u64				budget;
	u64				backed;
	unsigned int			nchunks;
	u64				peak;
	u64				adds;
	u64				dels;
	u64				failures;
	u64				recycled;
	u64				orphaned;
};

#define dma_bounce_count(pool, stat, n) this_cpu_add((pool)->stats->count[stat], n)

static inline void *dma_bounce_slot_va(struct dma_bounce_slot *slot)
{
	struct dma_bounce_chunk *chunk = slot->chunk;

	return chunk->va + ((slot - chunk->slots) << (chunk->class + DMA_BOUNCE_MIN_SHIFT));
}

static inline dma_addr_t dma_bounce_slot_iova(struct dma_bounce_slot *slot)
{
	struct dma_bounce_chunk *chunk = slot->chunk;

	return chunk->iova + ((dma_addr_t)(slot - chunk->slots) <<
			      (chunk->class + DMA_BOUNCE_MIN_SHIFT));
}

static inline size_t dma_bounce_slot_size(struct dma_bounce_slot *slot)
{
	return 1UL << (slot->chunk->class + DMA_BOUNCE_MIN_SHIFT);
}

/* Whether @addr is an address of @pool. Whoever got such an address saw the pool become ready. */
static inline bool dma_bounce_owns(struct dma_bounce_pool *pool, dma_addr_t addr)
{
	u64 len = smp_load_acquire(&pool->len);	/* pairs with dma_bounce_pool_start() */

	return addr - pool->base < len;
}

struct dma_bounce_pool *dma_bounce_pool_create(struct iommu_domain *domain,
					       struct iova_domain *iovad,
					       const struct iommu_bounce_ops *ops,
					       const char *name);
void dma_bounce_pool_destroy(struct dma_bounce_pool *pool);
void dma_bounce_pool_stop(struct dma_bounce_pool *pool);
void dma_bounce_pool_resume(struct dma_bounce_pool *pool);
void dma_bounce_pool_refresh(struct dma_bounce_pool *pool);
void dma_bounce_pool_first_use(struct dma_bounce_pool *pool, u64 mask);

struct dma_bounce_slot *dma_bounce_slot_get(struct dma_bounce_pool *pool,
					    enum dma_bounce_kind kind, size_t size);
void dma_bounce_slot_put(struct dma_bounce_pool *pool, struct dma_bounce_slot *slot);
struct dma_bounce_slot *dma_bounce_slot_find(struct dma_bounce_pool *pool, dma_addr_t addr);

extern const struct iommu_bounce_ops dma_bounce_page_ops;

size_t dma_bounce_threshold_option(void);

void dma_bounce_debugfs_add(struct dma_bounce_pool *pool);
void dma_bounce_debugfs_del(struct dma_bounce_pool *pool);

#endif /* _DMA_BOUNCE_POOL_H */
