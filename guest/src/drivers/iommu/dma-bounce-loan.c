// SPDX-License-Identifier: GPL-2.0-only
/*
 * Loans: memory that a pool has lent to applications
 *
 * A loan is the memory of one call of mmap(). It consists of chunks that have a place in the pool's
 * range, but no slots. A loan ends when the application has unmapped it and nothing holds its
 * pages.
 *
 * When the last device leaves a domain, the chunks go back to the provider at once, and
 * applications lose their mappings (SIGBUS). Something else, such as io_uring, may still hold the
 * pages. Then the chunks keep their places in the pool's range until the pages are released, and no
 * pool uses the provider's memory of these pages (see dma_bounce_chunk_make()).
 *
 * dma-bounce-lend.c makes the files that applications map.
 */

#include <linux/cleanup.h>
#include <linux/cred.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "dma-bounce-lend.h"
#include "dma-bounce-loan.h"
#include "dma-bounce-pool.h"

/* The pools of one source together lend at most a pool's budget / DMA_BOUNCE_LEND_PART. */
#define DMA_BOUNCE_LEND_PART	2

/**
 * struct dma_bounce_lent - a chunk that is lent
 * @pool:	pool of the chunk
 * @chunk:	the chunk
 * @phys:	physical address of its memory
 * @size:	length in bytes
 * @iova:	address for devices of the pool
 * @rcu:	frees this structure
 *
 * The first page of each folio of the chunk points to this structure. The provider may have made
 * one folio of the chunk's pages, or several.
 */
struct dma_bounce_lent {
	struct dma_bounce_pool	*pool;
	struct dma_bounce_chunk	*chunk;
	phys_addr_t		phys;
	size_t			size;
	dma_addr_t		iova;
	struct rcu_head		rcu;
};

/* All loans that have memory, of all pools */
static LIST_HEAD(all_loans);
static DEFINE_SPINLOCK(all_loans_lock);

/**
 * dma_bounce_loan_per_chunk - get the number of pages that each chunk lends
 * @pool: the pool
 *
 * Return: the number of pages. The last page of a chunk is not lent. Otherwise a buffer could span
 * two chunks that are adjacent in memory, but not in IOVA.
 */
unsigned long dma_bounce_loan_per_chunk(struct dma_bounce_pool *pool)
{
	return (1UL << (pool->slots.chunk_shift - PAGE_SHIFT)) - 1;
}

/* Chunks. The caller of these functions holds the mutex of the pool. */

static struct page *lent_page(struct dma_bounce_lent *lent, unsigned long i)
{
	return pfn_to_page(PHYS_PFN(lent->phys) + i);
}

/**
 * dma_bounce_loan_page - get a page of a loan
 * @loan: the loan, whose lock is held
 * @n: number of the chunk
 * @i: number of the page in the chunk
 *
 * Return: the page.
 */
struct page *dma_bounce_loan_page(struct dma_bounce_loan *loan, unsigned int n, unsigned long i)
{
	return lent_page(loan->chunks[n], i);
}

/* Returns the folio at page @i of a chunk, or NULL at the end. Moves @i after the folio. */
static struct folio *lent_folio(struct dma_bounce_lent *lent, unsigned long *i)
{
	struct folio *folio;

	if (*i >= lent->size >> PAGE_SHIFT)
		return NULL;
	folio = page_folio(lent_page(lent, *i));
	*i += folio_nr_pages(folio);
	return folio;
}

static void lent_mark(struct dma_bounce_lent *lent, void *data)
{
	struct folio *folio;
	unsigned long i = 0;

	while ((folio = lent_folio(lent, &i)))
		WRITE_ONCE(folio_page(folio, 0)->zone_device_data, data);
}

/**
 * dma_bounce_chunk_lend - add a chunk without slots that devices may read and write
 * @pool: the pool, whose mutex is held
 *
 * Return: the chunk, or an error pointer. dma_bounce_chunk_del() gives the chunk back.
 */
struct dma_bounce_chunk *dma_bounce_chunk_lend(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	dma_addr_t iova;
	size_t size;
	void *va;

	chunk = dma_bounce_chunk_make(pool, DMA_BOUNCE_RW, DMA_BOUNCE_CLASSES - 1, &va, &iova,
				      &size);
	if (IS_ERR(chunk))
		return chunk;
	/* A chunk that the host kept mapped over a reset may contain bytes of a device. */
	memset(va, 0, size);
	dma_bounce_chunk_publish_whole(&pool->slots, chunk, va, iova, size, DMA_BOUNCE_WHOLE);
	return chunk;
}

static struct dma_bounce_lent *lent_alloc(struct dma_bounce_pool *pool)
{
	struct dma_bounce_lent *lent;
	struct dma_bounce_chunk *chunk;

	lent = kzalloc(sizeof(*lent), GFP_KERNEL);
	if (!lent)
		return ERR_PTR(-ENOMEM);
	chunk = dma_bounce_chunk_lend(pool);
	if (IS_ERR(chunk)) {
		kfree(lent);
		return ERR_CAST(chunk);
	}
	lent->pool = pool;
	lent->chunk = chunk;
	lent->phys = pool->region.phys + (chunk->va - pool->region.va);
	lent->size = chunk->size;
	lent->iova = chunk->iova;
	lent_mark(lent, lent);
	return lent;
}

/* Frees a chunk, whose memory may already be taken back. */
static void lent_free(struct dma_bounce_lent *lent)
{
	if (lent->chunk->va)
		lent_mark(lent, NULL);
	dma_bounce_chunk_del(lent->pool, lent->chunk);
	kfree_rcu(lent, rcu);
}

/* Returns true if a page of a chunk is still in use, for example mapped by an application. */
static bool lent_held(struct dma_bounce_lent *lent)
{
	struct folio *folio;
	unsigned long i = 0;

	while ((folio = lent_folio(lent, &i)))
		if (folio_ref_count(folio) != 1)
			return true;
	return false;
}

/*
 * Gives back the chunks of a loan that nothing holds. Returns true if no chunk is left. The memory
 * of a stopped loan's free chunk may already be lent again, so such a chunk is looked at only once.
 */
static bool loan_give_back(struct dma_bounce_loan *loan)
{
	unsigned int n, left = 0;

	for (n = 0; n < loan->nchunks; n++) {
		if (!loan->chunks[n])
			continue;
		if (lent_held(loan->chunks[n])) {
			left++;
			continue;
		}
		lent_free(loan->chunks[n]);
		loan->chunks[n] = NULL;
	}
	return !left;
}

/* Returns true if a page of a loan that is not stopped is still in use. */
static bool loan_held(struct dma_bounce_loan *loan)
{
	unsigned int n;

	for (n = 0; n < loan->nchunks; n++)
		if (lent_held(loan->chunks[n]))
			return true;
	return false;
}

/**
 * dma_bounce_loan_put - drop a reference to a loan
 * @loan: the loan
 */
void dma_bounce_loan_put(struct dma_bounce_loan *loan)
{
	if (!refcount_dec_and_test(&loan->refs))
		return;
	fput(loan->file);
	kfree(loan);
}

/* Counts a loan towards its source. Returns false if the source lends too much then. */
static bool loan_count(struct dma_bounce_loan *loan, u64 limit)
{
	struct dma_bounce_loan *other;
	u64 bytes = loan->bytes;

	spin_lock(&all_loans_lock);
	list_for_each_entry(other, &all_loans, all)
		if (other->source == loan->source)
			bytes += other->bytes;
	if (bytes <= limit)
		list_add(&loan->all, &all_loans);
	spin_unlock(&all_loans_lock);
	return bytes <= limit;
}

/* Stops counting a loan, because its memory is taken back. May be called again. */
static void loan_discount(struct dma_bounce_pool *pool, struct dma_bounce_loan *loan)
{
	if (list_empty(&loan->all))
		return;
	scoped_guard(spinlock, &all_loans_lock)
		list_del_init(&loan->all);
	pool->lent -= loan->bytes;
	user_shm_unlock(loan->bytes, loan->ucounts);
}

/* Lets page faults of a loan's mappings fail. */
static void loan_stop_faults(struct dma_bounce_loan *loan)
{
	guard(mutex)(&loan->lock);
	loan->stopped = true;
}

/* Gives the chunks of a loan back. Nothing holds the pages, or the pool is about to be freed. */
static void loan_end(struct dma_bounce_pool *pool, struct dma_bounce_loan *loan)
{
	unsigned int n;

	loan_stop_faults(loan);
	loan_discount(pool, loan);
	for (n = 0; n < loan->nchunks; n++)
		if (loan->chunks[n])
			lent_free(loan->chunks[n]);
	loan->nchunks = 0;
	list_del(&loan->list);
	dma_bounce_loan_put(loan);
}

/**
 * dma_bounce_loan_make - make a loan for one mapping
 * @pool: the pool, whose mutex is held
 * @file: the file that is mapped
 * @nchunks: number of chunks
 *
 * Return: the loan with a reference for the mapping, or an error pointer.
 */
struct dma_bounce_loan *dma_bounce_loan_make(struct dma_bounce_pool *pool, struct file *file,
					     unsigned int nchunks)
{
	struct dma_bounce_loan *loan;
	struct dma_bounce_lent *lent;
	unsigned int n;

	loan = kzalloc(struct_size(loan, chunks, nchunks), GFP_KERNEL);
	if (!loan)
		return ERR_PTR(-ENOMEM);
	loan->source = READ_ONCE(pool->source);
	loan->bytes = (u64)nchunks << pool->slots.chunk_shift;
	loan->per_chunk = dma_bounce_loan_per_chunk(pool);
	/* Lent memory cannot be reclaimed, so it counts like locked memory. */
	loan->ucounts = current_ucounts();
	if (!user_shm_lock(loan->bytes, loan->ucounts)) {
		kfree(loan);
		return ERR_PTR(-ENOMEM);
	}
	if (!loan_count(loan, pool->budget / DMA_BOUNCE_LEND_PART)) {
		user_shm_unlock(loan->bytes, loan->ucounts);
		kfree(loan);
		return ERR_PTR(-ENOMEM);
	}
	pool->lent += loan->bytes;
	mutex_init(&loan->lock);
	loan->file = get_file(file);
	refcount_set(&loan->refs, 1);
	list_add(&loan->list, &pool->loans);
	for (n = 0; n < nchunks; n++) {
		lent = lent_alloc(pool);
		if (IS_ERR(lent)) {
			loan_end(pool, loan);
			return ERR_CAST(lent);
		}
		loan->nchunks = n + 1;
		loan->chunks[n] = lent;
	}
	/* The IOVA is unique among loans, so each loan has its own range of the file. */
	loan->start = loan->chunks[0]->iova;
	refcount_inc(&loan->refs);
	atomic_set(&loan->mappings, 1);
	return loan;
}

/* Removes all pages of a loan from the address spaces of applications. */
static void loan_unmap(struct dma_bounce_pool *pool, struct dma_bounce_loan *loan)
{
	unmap_mapping_range(loan->file->f_mapping, loan->start,
			    (loff_t)loan->nchunks << pool->slots.chunk_shift, 1);
}

/* Ends loans that are no longer used. */
static void loans_reap(struct dma_bounce_pool *pool)
{
	struct dma_bounce_loan *loan, *next;

	list_for_each_entry_safe(loan, next, &pool->loans, list) {
		if (loan->stopped ? loan_give_back(loan) :
		    !atomic_read(&loan->mappings) && !loan_held(loan))
			loan_end(pool, loan);
	}
}

/* Takes the memory of a loan back from devices. The chunks keep their places. */
static void loan_take_memory(struct dma_bounce_pool *pool, struct dma_bounce_loan *loan)
{
	unsigned int n;

	loan_discount(pool, loan);
	for (n = 0; n < loan->nchunks; n++)
		if (loan->chunks[n])
			dma_bounce_chunk_unmap(pool, loan->chunks[n]->chunk);
}

/*
 * Stops all loans, because the last device is about to leave the domain. The pool is not active, so
 * it makes no new loans. Does not wait for users of the pages. They see bytes of no other domain,
 * because no pool uses the memory of the pages while the pages are held. loans_reap() ends the
 * stopped loans later.
 */
static void loans_stop(struct dma_bounce_pool *pool)
{
	struct dma_bounce_loan *loan;
	unsigned int n;

	list_for_each_entry(loan, &pool->loans, list) {
		/* The memory of a loan that was stopped before may belong to another pool. */
		if (loan->stopped)
			continue;
		loan_stop_faults(loan);
		loan_unmap(pool, loan);
		for (n = 0; n < loan->nchunks; n++)
			lent_mark(loan->chunks[n], NULL);
	}
	/* Wait for dma_bounce_lent_map(), which may have found a loan's pages. */
	synchronize_rcu();
	list_for_each_entry(loan, &pool->loans, list)
		loan_take_memory(pool, loan);
	loans_reap(pool);
}

/* Forgets all loans of a pool that is about to be freed. */
static void loans_forget(struct dma_bounce_pool *pool)
{
	struct dma_bounce_loan *loan, *next;

	list_for_each_entry_safe(loan, next, &pool->loans, list)
		loan_end(pool, loan);
}

const struct dma_bounce_loan_ops dma_bounce_loan_ops = {
	.reap	= loans_reap,
	.stop	= loans_stop,
	.forget	= loans_forget,
};

/* Mapping for devices */

/**
 * dma_bounce_lent_map - find the device's address of lent memory
 * @pool: the pool of the device's domain
 * @phys: address of the memory, for which dma_bounce_is_lent() is true
 * @size: length of the memory in bytes
 *
 * Return: the address, or DMA_MAPPING_ERROR if the memory is not lent, or is lent by the pool of
 * another domain.
 */
dma_addr_t dma_bounce_lent_map(struct dma_bounce_pool *pool, phys_addr_t phys, size_t size)
{
	dma_addr_t addr = DMA_MAPPING_ERROR;
	struct dma_bounce_lent *lent;

	rcu_read_lock();
	lent = READ_ONCE(folio_page(page_folio(pfn_to_page(PHYS_PFN(phys))), 0)->zone_device_data);
	if (lent && lent->pool == pool && size <= lent->size - (phys - lent->phys)) {
		addr = lent->iova + (phys - lent->phys);
		dma_bounce_count(pool, DMA_BOUNCE_LENT, 1);
	}
	rcu_read_unlock();
	return addr;
}
