BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0300');
CREATE TABLE certificates (
	fingerprint VARCHAR(64) NOT NULL,
	party VARCHAR(16) NOT NULL,
	name VARCHAR(64) NOT NULL,
	not_before FLOAT NOT NULL,
	not_after FLOAT NOT NULL,
	added_at FLOAT NOT NULL,
	revoked_at FLOAT,
	reason VARCHAR,
	roles JSON NOT NULL,
	PRIMARY KEY (fingerprint)
);
CREATE TABLE consortia (
	number INTEGER NOT NULL,
	offered_at FLOAT NOT NULL,
	document VARCHAR NOT NULL,
	PRIMARY KEY (number)
);
CREATE TABLE interventions (
	id INTEGER NOT NULL,
	at FLOAT NOT NULL,
	action VARCHAR(16) NOT NULL,
	operator VARCHAR(64) NOT NULL,
	run VARCHAR(64),
	site VARCHAR(64),
	reason VARCHAR NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE rounds (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	size INTEGER NOT NULL,
	quorum INTEGER NOT NULL,
	enrolled INTEGER NOT NULL,
	opened_at FLOAT NOT NULL,
	closed_at FLOAT,
	state VARCHAR(64),
	aggregate VARCHAR(64),
	complete BOOLEAN,
	abandoned VARCHAR,
	scored BOOLEAN NOT NULL,
	aggregations INTEGER DEFAULT 0 NOT NULL,
	rolled_back BOOLEAN DEFAULT 0 NOT NULL,
	statistics JSON,
	PRIMARY KEY (run, round, attempt)
);
INSERT INTO "rounds" VALUES('kept',0,1,2,2,2,1.79593395787822484969e+09,1.79593395857931160931e+09,'0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',NULL,1,NULL,0,1,0,'{"prototype_min_distance": 1.111111088029502, "classes_covered": 0.0}');
INSERT INTO "rounds" VALUES('kept',1,1,2,2,2,1.79593395865402269363e+09,1.7959339677509438991e+09,'5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',NULL,1,NULL,1,1,0,'{"prototype_shift": 0.0034583413384841723, "prototype_min_distance": 1.0452030511488914, "classes_covered": 9.0}');
INSERT INTO "rounds" VALUES('kept',2,1,2,2,2,1.79593396793026781081e+09,1.79593397791193747515e+09,'210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',NULL,1,NULL,1,1,0,'{"prototype_shift": 0.002583830738072035, "prototype_min_distance": 0.9972776564802002, "classes_covered": 9.0}');
INSERT INTO "rounds" VALUES('kept',3,1,2,2,2,1.79593397802803158755e+09,NULL,NULL,NULL,NULL,NULL,0,0,0,NULL);
CREATE TABLE runs (
	run VARCHAR(64) NOT NULL,
	fingerprint VARCHAR(64) NOT NULL,
	recipe VARCHAR NOT NULL,
	position INTEGER NOT NULL,
	began_at FLOAT NOT NULL,
	ended_at FLOAT,
	outcome VARCHAR(16),
	reason VARCHAR,
	paused BOOLEAN DEFAULT 0 NOT NULL,
	PRIMARY KEY (run)
);
INSERT INTO "runs" VALUES('kept','ed3888d6cc743ae815f659f920e5c937bc48e6eea15e086476b293d3b548ce5f','{"name":"kept","seed":0,"rounds":5,"classes":10,"class_names":[],"input":{"shape":[1,8,8],"mean":[0.5],"std":[0.5],"fit":"exact","colours":"exact","window":null},"method":{"name":"fednh","scale":1.0},"model":{"name":"mlp","pretrained_body":null,"hidden":[16]},"plan":{"epochs":60,"batch_size":4,"drop_last":false,"loss":"cross-entropy","tau":1.0,"sampling":"shuffled","optimizer":"sgd","lr":0.01,"momentum":0.9,"weight_decay":0.0,"schedule":"constant","lr_decay":1.0,"lr_steps":[0.5,0.75],"warmup_rounds":0,"max_grad_norm":null,"augmentation":"none","amp":true,"buffers":"averaged","checkpoint":false,"dp":null},"federation":{"min_sites":2,"participation":1.0,"over_selection":1.0,"quorum":1.0,"deadline_s":600.0,"grace":0.5,"required_sites":[],"min_contributors":2,"stall_timeout_s":120.0,"max_attempts":5,"site_wait_timeout_s":604800.0,"max_update_norm":1000000000.0,"max_model_mb":512.0,"max_relative_norm":50.0,"outlier_factor":20.0,"robust":"none","max_bad_sites":1,"max_weight_ratio":4.0,"score_every":1,"score_personal_every":null,"best_by":null,"patience":null,"min_improvement":0.0,"score_deadline_s":600.0,"heartbeat_s":1.0,"secure":false,"sum_step_s":60.0,"sum_group":3},"evaluation":{"frequency_groups":false,"probabilities":false,"personal_test_images":null,"class_order":[]}}',1,1.79593394157983469961e+09,NULL,NULL,NULL,0);
CREATE TABLE score_sums (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	name VARCHAR(64) NOT NULL,
	mean FLOAT NOT NULL,
	sites INTEGER NOT NULL,
	PRIMARY KEY (run, round, attempt, name)
);
CREATE TABLE scores (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	name VARCHAR(64) NOT NULL,
	value FLOAT NOT NULL,
	PRIMARY KEY (run, round, attempt, site, name)
);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.pm_v',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.pm_l',8.75786714699164914321e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.balanced_accuracy',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.accuracy',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.pm_v',6.62393162393162371337e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.pm_l',8.98609899539643763866e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.balanced_accuracy',6.01923076923076783018e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.accuracy',6.0192307692307689404e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.pm_v',8.84615384615384581223e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.pm_l',9.45337995941509690034e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.balanced_accuracy',8.84615384615384692246e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.accuracy',8.84615384615384581223e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.pm_v',9.44444444444444419772e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.pm_l',9.74442089674994349479e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.balanced_accuracy',8.96153846153846189714e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.accuracy',8.96153846153846189714e-01);
CREATE TABLE sites (
	site VARCHAR(64) NOT NULL,
	roles JSON NOT NULL,
	excluded VARCHAR,
	PRIMARY KEY (site)
);
INSERT INTO "sites" VALUES('site-2','["trainer"]',NULL);
INSERT INTO "sites" VALUES('site-1','["trainer"]',NULL);
CREATE TABLE sum_groups (
	id INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	first VARCHAR(64) NOT NULL,
	formed_at FLOAT NOT NULL,
	dissolved_at FLOAT,
	PRIMARY KEY (id)
);
CREATE TABLE tasks (
	task_id VARCHAR(64) NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	kind VARCHAR(16) NOT NULL,
	base_digest VARCHAR(64),
	base_bytes INTEGER NOT NULL,
	task_status VARCHAR(16) NOT NULL,
	reason VARCHAR NOT NULL,
	subject VARCHAR(16),
	PRIMARY KEY (task_id)
);
INSERT INTO "tasks" VALUES('593fb2c8047cd1115fdc91b4a31425a0','kept',0,1,'site-1','initialise',NULL,0,'reported','',NULL);
INSERT INTO "tasks" VALUES('06971b7cc296a17f4b9cd1a5c29f65be','kept',0,1,'site-2','initialise',NULL,0,'reported','',NULL);
INSERT INTO "tasks" VALUES('1814f92100a84cd0322e1c54b1ffc151','kept',1,1,'site-1','fit','0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('b5af4195133829d1311066475b089ebb','kept',1,1,'site-2','fit','0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('0690d55c1925a190c3f058e39390d393','kept',1,1,'site-1','score','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('00ad7a3c1757a81a30eb736fe283784f','kept',1,1,'site-2','score','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('bd092edd8da47a7e23a4b4bcddf35ddb','kept',2,1,'site-1','fit','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('96f2a2a1968751653add8f4304253f5f','kept',2,1,'site-2','fit','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('7c3e954338de4be93cf4bc17bc5b0b8b','kept',2,1,'site-1','score','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('2075e0c534c3fc7ce16920bb484eaf2b','kept',2,1,'site-2','score','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('cd65ece997526337c91053e64fd9f253','kept',3,1,'site-1','fit','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'invited','',NULL);
INSERT INTO "tasks" VALUES('ee6146f02901710dc063be2608f299e4','kept',3,1,'site-2','fit','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'started','',NULL);
CREATE TABLE updates (
	id INTEGER NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	task_id VARCHAR(64) NOT NULL,
	verdict VARCHAR(16) NOT NULL,
	code VARCHAR(24) DEFAULT '' NOT NULL,
	reason VARCHAR NOT NULL,
	digest VARCHAR(64) NOT NULL,
	bytes INTEGER NOT NULL,
	metrics JSON NOT NULL,
	weight FLOAT,
	norm FLOAT,
	set_aside VARCHAR,
	record_hash VARCHAR(64) NOT NULL,
	at FLOAT NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "updates" VALUES(1,'kept',0,1,'site-2','06971b7cc296a17f4b9cd1a5c29f65be','accepted','','','90fb25ec9cc17a6e8756084f2729d82adf55fb6769fbb984e1664e35832899f2',5144,'{}',NULL,3.06656087183091274894e+00,NULL,'e535b8f7875a79106a6f40ce7df8f40a7b7939b08a44af446dd428bcbcbac5a5',1.79593395829687762265e+09);
INSERT INTO "updates" VALUES(2,'kept',0,1,'site-1','593fb2c8047cd1115fdc91b4a31425a0','accepted','','','90fb25ec9cc17a6e8756084f2729d82adf55fb6769fbb984e1664e35832899f2',5144,'{}',NULL,3.06656087183091274894e+00,NULL,'9551b36ddccd7d1645c8a54f23f6abdb6ef9ce7d0751a72e1ab2a9efcb404112',1.79593395848949694635e+09);
INSERT INTO "updates" VALUES(3,'kept',1,1,'site-1','1814f92100a84cd0322e1c54b1ffc151','accepted','','','7b80ee83d62520d3a73dbcc94a5b8a6683066506417fb7563f960576b5882c90',5612,'{"loss": 0.27874232889316586}',NULL,1.68067501865409774097e+01,NULL,'d121c590191876a6c747f9d427c3b6bfa7bbba74414b806b49f1cb2e285069df',1.79593396754934024814e+09);
INSERT INTO "updates" VALUES(4,'kept',1,1,'site-2','b5af4195133829d1311066475b089ebb','accepted','','','9271cbaab4612da5b33b5777e468b93527baccd3dbd39445f01540e433d8a017',5740,'{"loss": 0.41883310645517674}',NULL,1.72754466835384086205e+01,NULL,'42599e434b846c946e73a5d1a9bfa23dd7139ef9cefeedd947491efa88960ed2',1.7959339677132863998e+09);
INSERT INTO "updates" VALUES(5,'kept',2,1,'site-1','bd092edd8da47a7e23a4b4bcddf35ddb','accepted','','','ef80b18c37b7b5d34a7dc1cb341196a2aecae39f2b8daca192473440507c7f99',5612,'{"loss": 0.059827827441247976}',NULL,1.15662750016579121139e+01,NULL,'58dead50690e7c40ffecd930da2c0cfb3a68f1c434cbbf18156238b550094238',1.79593397691800785069e+09);
INSERT INTO "updates" VALUES(6,'kept',2,1,'site-2','96f2a2a1968751653add8f4304253f5f','accepted','','','e58c50aba52caabc7ab78d4ac438969b83f91c720fd5ac8f41b3548829fa34b9',5740,'{"loss": 0.021818776756826072}',NULL,6.14246342280202117791e+00,NULL,'8c6d16fd87cb90762574fd51a1421bee24e4de2552fa0a7eba4b485d0b9d7792',1.79593397788512849802e+09);
CREATE INDEX tasks_of_round ON tasks (run, round);
CREATE INDEX updates_of_round ON updates (run, round);
CREATE INDEX updates_of_site ON updates (run, site, round);
CREATE INDEX updates_of_task ON updates (task_id);
CREATE UNIQUE INDEX one_update_a_task ON updates (task_id) WHERE verdict = 'accepted';
CREATE UNIQUE INDEX one_group_a_site ON sum_groups (site) WHERE dissolved_at IS NULL;
COMMIT;
