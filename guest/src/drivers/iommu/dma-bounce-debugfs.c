// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounce pools in debugfs. /sys/kernel/debug/iommu_bounce/domainN/ has two files:
 *  - stats has lines of `key value`.
 *  - idle_ms is the time in ms after which an idle chunk is given back. It can be set to values
 *    from 1 to DMA_BOUNCE_MAX_IDLE_MS.
 */

#include <linux/debugfs.h>
#include <linux/seq_file.h>

#include "dma-bounce-debugfs.h"
#include "dma-bounce-pool.h"

static struct dentry *dma_bounce_dir;

static const char * const kind_names[DMA_BOUNCE_KINDS] = {
	[DMA_BOUNCE_READ]	= "read",
	[DMA_BOUNCE_WRITE]	= "write",
	[DMA_BOUNCE_RW]		= "rw",
};

static const char * const stat_names[DMA_BOUNCE_STATS] = {
	[DMA_BOUNCE_BYTES_IN]		= "bytes_in",
	[DMA_BOUNCE_BYTES_OUT]		= "bytes_out",
	[DMA_BOUNCE_UNWRITTEN]		= "not_copied_back",
	[DMA_BOUNCE_LENT]		= "lent_buffers",
	[DMA_BOUNCE_SINGLE_USE]		= "single_use",
	[DMA_BOUNCE_SYNCS]		= "syncs",
	[DMA_BOUNCE_ELISION_LOST]	= "sync_elision_lost",
	[DMA_BOUNCE_FB_STARTING]	= "fallback_starting",
	[DMA_BOUNCE_FB_FULL]		= "fallback_full",
	[DMA_BOUNCE_FB_SIZE]		= "fallback_size",
	[DMA_BOUNCE_FB_LAYOUT]		= "fallback_layout",
	[DMA_BOUNCE_FB_MASK]		= "fallback_mask",
	[DMA_BOUNCE_FB_ATTRS]		= "fallback_attrs",
	[DMA_BOUNCE_FB_MEMORY]		= "fallback_memory",
};

/**
 * dma_bounce_pool_stat - read a counter of a pool
 * @pool: the pool. Its allocator must not be opened at the same time.
 * @stat: the counter
 *
 * Return: the sum over all CPUs, which may already be outdated.
 */
u64 dma_bounce_pool_stat(struct dma_bounce_pool *pool, enum dma_bounce_stat stat)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += READ_ONCE(per_cpu_ptr(pool->stats, cpu)->count[stat]);
	/* So far, the sum has only bytes of buffers for one mapping. Add bytes of slots. */
	if (pool->slots.len && (stat == DMA_BOUNCE_BYTES_IN || stat == DMA_BOUNCE_BYTES_OUT))
		sum += dma_bounce_slots_bytes(&pool->slots, stat == DMA_BOUNCE_BYTES_IN);
	return sum;
}

/* Shows the number of mappings that slots served. It is 0 before the allocator is open. */
static void show_bounced(struct seq_file *m, struct dma_bounce_slots *slots)
{
	u64 n[DMA_BOUNCE_MAPPED_TYPES] = {};
	unsigned int i;

	for (i = 0; slots->len && i < DMA_BOUNCE_MAPPED_TYPES; i++)
		n[i] = dma_bounce_slots_served(slots, i);
	seq_printf(m, "bounced_pages %llu\nbounced_lists %llu\nbounced_requests %llu\n",
		   n[DMA_BOUNCE_SINGLE], n[DMA_BOUNCE_ENTRY] + n[DMA_BOUNCE_LIST],
		   n[DMA_BOUNCE_REQUEST]);
}

static void show_slots(struct seq_file *m, struct dma_bounce_pool *pool)
{
	unsigned int kind, class, nslots, nfree;
	struct dma_bounce_depot *depot;

	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++) {
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++) {
			depot = &pool->slots.depots[kind][class];
			raw_spin_lock_irq(&depot->lock);
			nslots = depot->nslots;
			nfree = depot->nfree;
			raw_spin_unlock_irq(&depot->lock);
			if (!nslots)
				continue;
			seq_printf(m, "slots_%s_%zu %u\n", kind_names[kind],
				   dma_bounce_class_size(class), nslots);
			seq_printf(m, "free_%s_%zu %u\n", kind_names[kind],
				   dma_bounce_class_size(class),
				   nfree + dma_bounce_slots_cached(&pool->slots, kind, class));
		}
	}
}

static int stats_show(struct seq_file *m, void *unused)
{
	struct dma_bounce_pool *pool = m->private;
	unsigned int i;

	mutex_lock(&pool->slots.mutex);
	seq_printf(m, "device %s\nprovider %s\nactive %d\n", pool->name, pool->ops->name,
		   pool->active);
	seq_printf(m, "iova_start %#llx\niova_len %llu\nchunk_size %lu\n", (u64)pool->slots.base,
		   pool->slots.len, pool->slots.len ? 1UL << pool->slots.chunk_shift : 0);
	seq_printf(m, "threshold %u\nthreshold_write %u\nbudget %llu\n", pool->threshold.read,
		   pool->threshold.write, pool->budget);
	seq_printf(m, "threshold_measured %u\nthreshold_write_measured %u\n",
		   pool->calibrated.read, pool->calibrated.write);
	seq_printf(m, "chunks %u\nchunk_bytes %llu\npeak_chunk_bytes %llu\n", pool->nchunks,
		   pool->backed, pool->peak);
	seq_printf(m, "chunk_adds %llu\nchunk_dels %llu\nchunk_failures %llu\nchunks_ahead %llu\n",
		   pool->adds, pool->dels, pool->failures, pool->ahead);
	seq_printf(m, "chunks_recycled %llu\nchunks_shrunk %llu\nchunks_drained %llu\n",
		   pool->recycled, pool->shrunk, pool->drained);
	seq_printf(m, "chunks_stuck %llu\nchunks_yielded %llu\nslots_orphaned %llu\n", pool->stuck,
		   pool->yielded, pool->orphaned);
	seq_printf(m, "chunks_blocked %llu\n", pool->blocked);
	show_bounced(m, &pool->slots);
	for (i = 0; i < DMA_BOUNCE_STATS; i++)
		seq_printf(m, "%s %llu\n", stat_names[i], dma_bounce_pool_stat(pool, i));
	if (pool->slots.len)
		show_slots(m, pool);
	mutex_unlock(&pool->slots.mutex);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

static int idle_ms_get(void *data, u64 *value)
{
	struct dma_bounce_pool *pool = data;

	*value = READ_ONCE(pool->idle_ms);
	return 0;
}

static int idle_ms_set(void *data, u64 value)
{
	struct dma_bounce_pool *pool = data;

	if (!value || value > DMA_BOUNCE_MAX_IDLE_MS)
		return -EINVAL;
	dma_bounce_pool_set_idle(pool, value);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(idle_ms_fops, idle_ms_get, idle_ms_set, "%llu\n");

/**
 * dma_bounce_debugfs_add - add a pool's files
 * @pool: the pool
 */
void dma_bounce_debugfs_add(struct dma_bounce_pool *pool)
{
	char name[24];

	snprintf(name, sizeof(name), "domain%d", pool->id);
	if (!dma_bounce_dir)
		dma_bounce_dir = debugfs_create_dir("iommu_bounce", NULL);
	pool->dir = debugfs_create_dir(name, dma_bounce_dir);
	debugfs_create_file("stats", 0400, pool->dir, pool, &stats_fops);
	debugfs_create_file_unsafe("idle_ms", 0600, pool->dir, pool, &idle_ms_fops);
}

/**
 * dma_bounce_debugfs_del - remove a pool's files
 * @pool: the pool
 */
void dma_bounce_debugfs_del(struct dma_bounce_pool *pool)
{
	debugfs_remove_recursive(pool->dir);
}
